# SPDX-License-Identifier: Apache-2.0
"""What a fuzzer says when it found something."""


class DifferenceError(Exception):
    """We and the oracle read an input differently, and no rule of strictness.py says why."""
