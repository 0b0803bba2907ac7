# SPDX-License-Identifier: Apache-2.0
"""How long an endpoint that refused asks to be left alone: Retry-After (RFC 9110, section 10.2.3). Pure but for the
clock, which a date is compared with if the response has no Date of its own."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_FIELD: Final = re.compile(rb"(?im)^(retry-after|date):[ \t]*([^\r\n]{1,64}?)[ \t]*\r$")
_SECONDS: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def retry_after_s(fields: bytes) -> float | None:
    """The seconds that the field lines of a response ask for, above 0; None: none, or nothing that can be read."""
    found = {name.lower(): value.decode("latin-1") for name, value in _FIELD.findall(fields)}
    asked = found.get(b"retry-after")
    if asked is None:
        return None
    if _SECONDS.fullmatch(asked):
        return float(asked) or None
    until = _at(asked)
    if until is None:
        return None
    now = _at(found.get(b"date", "")) or datetime.fromtimestamp(time.time(), UTC)
    return max(0.0, (until - now).total_seconds()) or None


def _at(date: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(date)
    except (ValueError, IndexError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
