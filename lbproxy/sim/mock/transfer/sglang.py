# SPDX-License-Identifier: Apache-2.0
"""`bootstrap_host`, `bootstrap_port` and `bootstrap_room` of SGLang: where the two halves of a request meet.

Prefill and decode servers refuse a request without a room; see docs/decisions/0041, section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lbproxy.sim.mock.apis.fields import EngineError, Json, invalid, shown

FAKE_HOST = "2.2.2.2"
"""The host of SGLang's own health checks: nothing is transferred, and decode runs on empty KV."""
DEFAULT_PORT = 8998
MAX_ROOM = 2**63 - 1
MAX_HOST = 512


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one prompt's prefill and decode meet."""

    host: str
    port: int
    room: int

    @property
    def is_fake(self) -> bool:
        """Nothing is transferred."""
        return self.host == FAKE_HOST


def parse(fields: Json, *, prompts: int, n: int, own_port: int) -> list[Meeting]:
    """One for each choice. A room for several becomes consecutive ones; a list is repeated for `n`. Raises ApiError:
    also for a request without a room.
    """
    rooms = _each(fields, "bootstrap_room", int, prompts)
    if rooms is None or None in rooms:
        text = "Disaggregated request received without bootstrap room id"
        raise EngineError(400, text, "BadRequestError", "bootstrap_room")
    hosts = _each(fields, "bootstrap_host", str, prompts) or [None] * prompts
    ports = _each(fields, "bootstrap_port", int, prompts) or [None] * prompts
    meetings: list[Meeting] = []
    is_one = not isinstance(fields["bootstrap_room"], list)
    for index in range(prompts * n):
        prompt = index // n
        room, host, port = rooms[prompt], hosts[prompt], ports[prompt]
        assert isinstance(room, int)
        meeting = Meeting(
            str(host or "127.0.0.1"), port if isinstance(port, int) else own_port, room + (index if is_one else 0)
        )
        if not 0 <= meeting.room <= MAX_ROOM or not 0 < meeting.port <= 65535 or len(meeting.host) > MAX_HOST:
            raise invalid("value_error", "body.bootstrap_room", "Input out of range", shown(fields["bootstrap_room"]))
        meetings.append(meeting)
    return meetings


def _each(fields: Json, name: str, kind: type[int | str], prompts: int) -> Sequence[object] | None:
    """A field's value for each prompt: one for all of them, or a list. None = it is not there."""
    given = fields.get(name)
    if given is None:
        return None
    values = given if isinstance(given, list) else [given] * prompts
    fits = len(values) == prompts and all(value is None or type(value) is kind for value in values)
    if not fits or not all(value is None or not isinstance(value, str) or value.isprintable() for value in values):
        what = "integer" if kind is int else "string"
        raise invalid(f"{what}_type", f"body.{name}", f"Input should be a valid {what}, or one a prompt", shown(given))
    return values
