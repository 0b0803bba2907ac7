# SPDX-License-Identifier: Apache-2.0
"""Takes the usage that lbproxy asked for out of a stream of chat or completions, whose client did not ask for it.

What a server writes without being asked differs, and all of it is the client's: nothing (vLLM), `"usage":null` in each
event (SGLang's completions), or the usage itself (transformers, and what vLLM is told to write always). So a stream
that nobody asked for is looked at first, and shows the form of its server's streams. Of those that are asked:

    UNSAID     the event that has nothing else is dropped, and each `usage` is cut out of its event
    NULL       likewise, and each `usage` but null becomes null
    ANYWAY     never asked: it says how much it used, writes `timings` into the last event, as llama.cpp, or refused

All other bytes stay as they are. An event is passed on once it is whole, unless it is longer than `MAX_EVENT_BYTES`.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, Final

import orjson

from lbproxy.core.responses.usage import USAGE_KEY

MAX_EVENT_BYTES: Final = 1 << 20
"""A longer event has no usage: it passes as it comes."""
_CHOICES: Final = b'"choices"'
_TIMINGS: Final = b'"timings"'
"""llama.cpp writes them into the last event: with the usage, if it is asked for that, and else with the choice."""
_ENDS: Final = [b"\n\n", b"\n\r\n", b"\r\r"]
_EMPTY_LINE: Final = re.compile(rb"\n\r?\n|\r\r")
_DATA: Final = re.compile(rb"(?:\A|(?<=[\r\n]))data:[ \t]*")
_LINE_END: Final = re.compile(rb"[\r\n]")
_MEMBER: Final = re.compile(r'"usage"\s*:\s*')
_COMMA_BEFORE: Final = re.compile(r"\s*,\s*\Z")
_COMMA_AFTER: Final = re.compile(r"\s*,\s*")
_DECODER: Final = json.JSONDecoder()


class UsageForm(Enum):
    """What of its usage a server writes into streams that it is not asked for it: see the module."""

    UNKNOWN = "unknown"
    UNSAID = "unsaid"
    NULL = "null"
    ANYWAY = "anyway"

    @property
    def is_asked(self) -> bool:
        """Such a server is asked for usage."""
        return self is UsageForm.UNSAID or self is UsageForm.NULL


class UnaskedUsage:
    """One stream. With the forms UNKNOWN and ANYWAY, whose streams are not asked, nothing of it is changed."""

    def __init__(self, form: UsageForm) -> None:
        self.form = form
        self.changes = form.is_asked
        self._tail = bytearray()
        """The beginning of an event."""
        self.is_whole = True
        """What passed ends with an event, or is nothing."""
        self._has_choices = False
        self._shown = UsageForm.UNSAID

    def feed(self, piece: bytes) -> bytes:
        """The next piece of the payload. Returns what goes to the client."""
        events = self._whole(piece)
        if self.form is UsageForm.UNKNOWN:
            self._look(events)
        if not self.changes:
            return piece
        return self._without(events) if events.partition(USAGE_KEY)[1] else events  # see EventScanner.is_token

    def end(self) -> bytes:
        """The stream is complete. Returns what is left: an event that no empty line ended."""
        rest = bytes(self._tail)
        self._tail.clear()
        return self._without(rest) if self.changes else b""

    @property
    def learned(self) -> UsageForm | None:
        """What a complete stream shows of its server; None: nothing."""
        if self.form is UsageForm.ANYWAY:
            return self.form
        return self._shown if self.form is UsageForm.UNKNOWN and self._has_choices else None

    def _whole(self, piece: bytes) -> bytes:
        """The events that this piece ends."""
        tail = self._tail
        if not tail and piece.endswith(b"\n\n"):
            self.is_whole = True
            return piece
        searched = max(0, len(tail) - 2)
        tail += piece
        last = max(tail.rfind(end, searched) + len(end) if tail.find(end, searched) >= 0 else 0 for end in _ENDS)
        if last:
            self.is_whole = True
        elif len(tail) > MAX_EVENT_BYTES or not self.is_whole:
            self.is_whole, last = False, len(tail)
        events = bytes(tail[:last])
        del tail[:last]
        return events

    def _look(self, events: bytes) -> None:
        if not self._has_choices:
            self._has_choices = events.find(_CHOICES) >= 0
        if not (events.partition(USAGE_KEY)[1] or events.partition(_TIMINGS)[1]):
            return
        for event in _EMPTY_LINE.split(events):
            said = _said(event)
            if said is not None and (type(said.get("usage")) is dict or "timings" in said):
                self._shown = UsageForm.ANYWAY
            elif said is not None and "usage" in said and self._shown is not UsageForm.ANYWAY:
                self._shown = UsageForm.NULL

    def _without(self, events: bytes) -> bytes:
        """The same events without what the client did not ask for."""
        kept: list[bytes] = []
        begin = 0
        while begin < len(events):
            end = _EMPTY_LINE.search(events, begin)
            until = len(events) if end is None else end.end()
            kept.append(self._event(events[begin:until]))
            begin = until
        return b"".join(kept)

    def _event(self, event: bytes) -> bytes:
        said = _said(event)
        if said is None or "usage" not in said:
            return event
        keeps_null = self.form is UsageForm.NULL
        if said["usage"] is None and keeps_null:
            return event
        if said["usage"] is not None and not said.get("choices") and "error" not in said:
            return b""
        before, line, after = _parts(event)
        return before + _cut(line, said, null=keeps_null) + after


def _said(event: bytes) -> dict[str, Any] | None:
    """What an event with one line of data says; None: no object."""
    said = _parsed(_parts(event)[1]) if len(_DATA.findall(event)) == 1 else None
    return said if type(said) is dict else None


def _parts(event: bytes) -> tuple[bytes, bytes, bytes]:
    """What is before its data, the data, and what follows."""
    found = _DATA.search(event)
    begin = len(event) if found is None else found.end()
    end = _LINE_END.search(event, begin)
    until = len(event) if end is None else end.start()
    return event[:begin], event[begin:until], event[until:]


def _cut(line: bytes, said: dict[str, Any], *, null: bool) -> bytes:
    """An object without its `usage`, or with null in that place. All other bytes of it stay."""
    rest: dict[str, Any] = {name: value for name, value in said.items() if name != "usage"}
    if null:
        rest = {**said, "usage": None}
    text = line.decode("utf-8", "surrogateescape")
    for member in reversed(list(_MEMBER.finditer(text))):
        try:
            _, end = _DECODER.raw_decode(text, member.end())
        except (ValueError, RecursionError):
            continue
        if null:
            changed = f"{text[: member.end()]}null{text[end:]}"
        elif (comma := _COMMA_BEFORE.search(text, 0, member.start())) is not None:
            changed = text[: comma.start()] + text[end:]
        else:
            after = _COMMA_AFTER.match(text, end)
            changed = text[: member.start()] + text[end if after is None else after.end() :]
        result = changed.encode("utf-8", "surrogateescape")
        if _parsed(result) == rest:  # it was no deeper, and is there no second time
            return result
    return orjson.dumps(rest)


def _parsed(line: bytes) -> object:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
