"""A large JSON body, read in many short turns of the event loop: outlined first (`core.requests.outline`), then parsed,
one segment a turn.

A segment ends in a list that is a value of the outermost object, where a comma stood, and the next one goes on there.
Each is made JSON of its own by an object around it: with a value of `_TOKEN` at the open end of the list, and with a
list of that name, which begins with such a value, where it goes on. Since a comma needs a value on either side, the
segments are JSON exactly if the whole is. Nobody outside can guess the token.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Final

import orjson

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import Outline, cost

LENIENT_JSON_COST: Final = 4 << 20
"""Up to here (see `core.requests.outline`) what orjson refuses (NaN, lone surrogates) is read again by the standard
library, which is slower, but accepts what the model servers' own parsers accept."""
_UTF8: Final = {"utf-8", "utf-8-sig"}
"""What JSON is written in between systems (RFC 8259, section 8.1). Python's json would read UTF-16 too, other servers
would not, and nothing could be put into it as bytes."""
_TOKEN: Final = secrets.token_hex(16)
_GOES_ON: Final = b'{"%b":["%b",' % (_TOKEN.encode(), _TOKEN.encode())
_OPEN: Final = b',"%b"]}' % _TOKEN.encode()


def load_json(text: bytes) -> object:
    """Raises LbError INVALID_JSON."""
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
    """One body. `step` until it says that there is no more, then `value` and `outline`."""

    def __init__(self, body: bytes) -> None:
        self.value: object = None
        """What was parsed: long strings with marks in them."""
        self.outline = Outline(body)
        self._segments: list[bytes] = []
        self._done = 0
        self._open: list[Any] = []
        """The list in which the last segment ended."""

    def step(self) -> bool:
        """Look at some more of the body, or parse a segment of it. Returns whether there is more to do. Raises LbError
        INVALID_JSON.
        """
        if not self._segments:
            if not self.outline.step():
                self._segments = self.outline.segments
            return True
        at = self._done
        self._done += 1
        is_last = self._done == len(self._segments)
        text = self._segments[at]
        if at or not is_last:
            text = b"".join((_GOES_ON if at else b"", text, b"" if is_last else _OPEN))
        parsed = load_json(text)
        if at == 0:
            self.value = parsed
        if at or not is_last:
            assert isinstance(parsed, dict)
            self._join(parsed, goes_on=at > 0, is_open=not is_last)
        return not is_last

    def _join(self, fields: dict[str, Any], *, goes_on: bool, is_open: bool) -> None:
        """Put what a segment says to what those before it said."""
        if goes_on:
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
