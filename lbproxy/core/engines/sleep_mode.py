"""Sleep mode: what the settings say of it for an endpoint, and what its engine reports of it. Pure.

The contract is vLLM's (docs/decisions/0045): `GET /is_sleeping` returns `{"is_sleeping": bool}`. An endpoint whose
engine does not say so in this form is taken to be awake.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import orjson

STATE_PATH: Final = "/is_sleeping"


class ColdStart(NamedTuple):
    """A webhook that has an endpoint started which is not there at all."""

    url: str
    timeout_s: float
    """In which it must be up, from the call on."""


class SleepSpec(NamedTuple):
    """What the settings say of an endpoint that may sleep, or may not be there."""

    wake: bool = True
    """It may be woken, and put to sleep."""
    after_s: float | None = None
    """It is put to sleep after so many seconds without a request; None = never for that reason."""
    level: int = 1
    """1: the engine keeps its weights in host memory; 2: it discards them, and reads them again when it wakes."""
    host: str | None = None
    """The group of endpoints that share GPUs; None = it shares them with no other."""
    cold_start: ColdStart | None = None


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
