# SPDX-License-Identifier: Apache-2.0
"""What lbproxy says of an address that it cannot have, in the words of the demo, which has options and no settings."""

from __future__ import annotations

import re

_TAKEN = re.compile(r"(cannot listen on \S+) \((listen|admin)\): (.+)")


def in_options(text: str) -> str:
    """The same, with the option that says another address. Other texts stay as they are."""
    return _TAKEN.sub(r"\1: \3; say another: lbproxy demo --\2 HOST:PORT", text)
