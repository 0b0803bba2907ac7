# SPDX-License-Identifier: Apache-2.0
"""The kinds of hostile clients, by the state of the connection that they abuse."""
