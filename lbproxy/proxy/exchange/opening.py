# SPDX-License-Identifier: Apache-2.0
"""What of a response waits to be sent while another response may still take its place: its head, and of a stream what
comes before the end of its first event.

Comments only say that a server is alive: they are sent alone, and promise nothing (docs/decisions/0056). A stream that
fails at once says so in an event. An engine sends it first, or after events that stand for no token: the role in a
chat, `response.created` and the like, `message_start`. For a second leg that follows the first these are held until a
token follows, as decode finds out only now whether it can fetch the KV cache of the prompt.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from lbproxy.core.responses.sse import EventScanner

MAX_HELD_BYTES: Final = 256 << 10
"""`response.created` repeats the instructions and tools of the request."""
_REFUSAL: Final = re.compile(rb'^data: ?(\{(?:"type": ?"error", ?)?"error": ?\{[^\n]{0,4096})\n', re.MULTILINE)
"""From the beginning of a line only: from each `data:` in it, a line of them would take seconds."""
_REFUSAL_BYTES: Final = 4096
_TYPES: Final = {
    "api_error": 500,
    "internal_error": 500,
    "internal_server_error": 500,
    "overloaded_error": 529,
    "rate_limit_error": 429,
    "server_error": 500,
    "timeout_error": 504,
}
"""What an error that has no status is by its type: in Anthropic's API, vLLM's form of it, and OpenAI's."""
_ERROR_EVENT: Final = re.compile(rb"(?:^|\n)event: ?error\r?\n")
"""In /v1/messages: vLLM 0.32 states no status there."""


_EMPTY_LINE: Final = re.compile(rb"\n\n|\r\n\r\n")


class Opening:
    """What waits. Taken whole when the first of the body is sent."""

    def __init__(self, *, holds: bool, events: int) -> None:
        """`holds`: first events are held. `events`: so many stand for no token, beside those of the preamble that the
        scanner counts.
        """
        self.head = b""
        """Until it is sent."""
        self.held = b""
        """The first of the body."""
        self._holds, self._events = holds, events

    def refusal(self, data: bytes) -> int | None:
        """The HTTP status of the error with which a stream begins. `data`: the body so far."""
        line = self.held.rfind(b"\n") + 1  # what is before it was looked at
        found = _REFUSAL.search(data, line, len(self.held) + _REFUSAL_BYTES)
        if found is not None:
            return _status(found[1])
        return 500 if self._holds and _ERROR_EVENT.search(data, max(0, line - 1)) else None

    def keeps(self, data: bytes, scanner: EventScanner) -> bool:
        """Whether the body so far, `data`, is held: its first event is incomplete, or no token followed yet."""
        events = scanner.events
        if not events:
            waits = not scanner.has_content
        else:
            is_first = events == 1 and not (scanner.at_boundary or scanner.is_opaque)
            is_cut = is_first and _EMPTY_LINE.search(data, max(0, len(self.held) - 3)) is None
            waits = is_cut or (self._holds and events - scanner.preamble_events <= self._events)
        if waits and len(data) < MAX_HELD_BYTES:
            self.held = data
            return True
        self.held = b""
        return False

    def take_head(self) -> bytes:
        """The head, which is sent alone."""
        head, self.head = self.head, b""
        return head

    def take(self) -> bytes:
        data, self.held = self.take_head() + self.held, b""
        return data


def _status(text: bytes) -> int | None:
    """The status of an error; None: none by which it would be tried elsewhere."""
    try:
        error = orjson.loads(text)["error"]
    except orjson.JSONDecodeError:
        return None
    if type(error) is not dict:  # there is a second one
        return None
    code = error.get("code")
    if type(code) is str and code.isdecimal() and len(code) == 3:
        code = int(code)
    if type(code) is int:
        return code if code == 429 or 500 <= code < 600 else None
    return _TYPES.get(str(error.get("type")))
