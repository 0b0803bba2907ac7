# SPDX-License-Identifier: Apache-2.0
"""A large JSON body, parsed in as few turns of the event loop as are short.

One that costs little is parsed at once, if orjson does not refuse it. Any other is outlined first
(`core.requests.outline`), then parsed, one segment a turn. A segment ends at a comma in a list
that is a value of the outermost object; the next segment continues that list. Each segment is completed to valid JSON:
a value of `_TOKEN` is put at the open end of the list, and a continued list is given that name and starts with such a
value. Since a comma needs a value on either side, the segments are valid JSON exactly if the body is. Clients cannot
guess the token.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Final

import orjson

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import Outline, cost, costs_little, quick_segments

LENIENT_JSON_COST: Final = 4 << 20
"""Up to this cost (see `core.requests.outline`), a body that orjson refuses (NaN, lone surrogates) is parsed again by
the standard library, which is slower but accepts what the model servers' own parsers accept."""
_UTF8: Final = {"utf-8", "utf-8-sig"}
"""The encoding of JSON between systems (RFC 8259, section 8.1). Python's json would read UTF-16 too, other servers
would not, and bytes could not be inserted into it."""
_TOKEN: Final = secrets.token_hex(16)
_CONTINUED: Final = b'{"%b":["%b",' % (_TOKEN.encode(), _TOKEN.encode())
_UNFINISHED: Final = b',"%b"]}' % _TOKEN.encode()


def load_json(text: bytes) -> object:
    """Parse JSON. Raises LbError INVALID_JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        problem = str(error)
    if cost(text) <= LENIENT_JSON_COST and json.detect_encoding(text) in _UTF8:
        try:
            loaded: object = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return loaded
    raise LbError(Outcome.INVALID_JSON, f"The request body is not valid JSON: {problem}")


class LargeJson:
    """One large body. Call `step` until it returns False; then `value` and `outline` are complete."""

    def __init__(self, body: bytes) -> None:
        self.value: object = None
        """The parsed body, with markers in long strings."""
        self.outline: Outline | None = None
        """None: it was parsed without one."""
        self._body = body
        self._costs_little = costs_little(body)
        self._segments: list[bytes] = []
        self._done = 0
        self._open: list[Any] = []
        """The list that is open at the end of the last segment."""

    def step(self) -> bool:
        """Outline some more of the body, or parse one segment. Returns whether there is more to do. Raises LbError
        INVALID_JSON.
        """
        outline = self.outline
        if outline is not None:
            if not self._segments:
                if not outline.step():
                    self._segments = outline.segments
                return True
        elif self._costs_little:
            try:
                self.value = orjson.loads(self._body)
            except orjson.JSONDecodeError:
                self.outline = Outline(self._body)
            return self.outline is not None
        elif not self._segments:
            self._segments = quick_segments(self._body) or []
            if not self._segments:
                self.outline = Outline(self._body)
            return True
        at = self._done
        self._done += 1
        is_last = self._done == len(self._segments)
        text = self._segments[at]
        if at or not is_last:
            text = b"".join((_CONTINUED if at else b"", text, b"" if is_last else _UNFINISHED))
        parsed = load_json(text)
        if at == 0:
            self.value = parsed
        if at or not is_last:
            assert isinstance(parsed, dict)
            self._join(parsed, is_continued=at > 0, is_open=not is_last)
        return not is_last

    def _join(self, fields: dict[str, Any], *, is_continued: bool, is_open: bool) -> None:
        """Add a segment's fields to those of the segments before it."""
        if is_continued:
            more = fields.pop(_TOKEN)
            still = is_open and more[-1] == _TOKEN and len(more) > 1
            self._open += more[1:-1] if still else more[1:]
            assert isinstance(self.value, dict)
            self.value.update(fields)
            if still:
                return
        if is_open:
            self._open = next(one for one in fields.values() if type(one) is list and one and one[-1] == _TOKEN)
            self._open.pop()
