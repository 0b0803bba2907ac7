# SPDX-License-Identifier: Apache-2.0
"""Programs that applications and agents are written with, each in an environment of its own, through lbproxy."""
