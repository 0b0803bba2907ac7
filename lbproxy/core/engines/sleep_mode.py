# SPDX-License-Identifier: Apache-2.0
"""What an engine reports of its sleep mode. Pure.

The contract is vLLM's (docs/decisions/0045): `GET /is_sleeping` returns `{"is_sleeping": bool}`. An endpoint whose
engine does not say so in this form is taken to be awake.
"""

from __future__ import annotations

from typing import Final

import orjson

STATE_PATH: Final = "/is_sleeping"


def read_state(status: int, body: bytes) -> bool | None:
    """Whether an engine sleeps, by its response to `STATE_PATH`. None: it cannot say."""
    if status != 200:
        return None
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    said = value.get("is_sleeping") if isinstance(value, dict) else None
    return said if isinstance(said, bool) else None


def is_silent(status: int) -> bool:
    """Whether a response says nothing about the engine, now: it may another time. Others refuse for good."""
    return (status >= 500 and status != 501) or status in {408, 429}
