# SPDX-License-Identifier: Apache-2.0
"""Fuzzers with an oracle: every parser of what comes from outside, held against somebody else's."""
