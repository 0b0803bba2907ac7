# SPDX-License-Identifier: Apache-2.0
"""A member of the outermost object of a JSON text that comes in pieces, however large, without parsing the text.

Strings are skipped and the brackets outside of them counted, at C speed: some 5 ns a byte. So what stands in a string,
or deeper, is not taken for the member. Of the text at most `VALUE_BYTES` and `CARRIED_BYTES` are kept.
"""

from __future__ import annotations

import re
from typing import Final

from lbproxy.core.requests.outline import STRING

VALUE_BYTES: Final = 4096
"""How much of a member's value is kept: a usage of vLLM has some 150 bytes, of Anthropic's API some 500."""
CARRIED_BYTES: Final = 64
"""How much of an unfinished string is kept, which may become the member's key; a longer one cannot."""
_STRING_END: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_HEAD_BYTES: Final = 96
_ENVELOPE: Final = re.compile(
    rb'(?:data:)?[ \t]*\{[ \t]*"(?:(?:response|message)"[ \t]*:[ \t]*\{'
    rb'|type"[ \t]*:[ \t]*"(?:response\.|message_start"))'
)
"""How the events of /v1/responses and /v1/messages begin that have the object of interest in a member of theirs. All
members of such an event, and of that object, are the engine's own: what clients choose is deeper."""

_BLANK: Final = b"\xef\xbb\xbf \t\r\n"
"""What may stand before the text: servers may write a byte order mark."""
_OPENING: Final = frozenset((b"{", b"[", b'"'))


class JsonWalk:
    """One text; or one line of an event stream, with its `data:`."""

    def __init__(self, name: bytes) -> None:
        """`name`: of the member, without characters that JSON or a regular expression escapes."""
        self._name = b'"' + name + b'"'
        self._key = re.compile(rb'(?<!\\)"%b"[ \t\r\n]*:[ \t\r\n]*' % name)
        self._head = b""
        """The beginning of the text."""
        self._carried = b""
        """The end of the last piece, which may go on in the next: an unfinished string, or the key."""
        self._in_string = False
        """The last piece ended in a string whose beginning is not kept."""
        self._room = 0
        """How many bytes of `value` are still to come."""
        self.depth = 0
        """How many brackets are open."""
        self.value = b""
        """The text of the last such member's value, and what follows, up to `VALUE_BYTES`."""

    def feed(self, piece: bytes) -> None:
        """The next piece of the text."""
        if len(self._head) < _HEAD_BYTES:
            self._head = (self._head + piece[:_HEAD_BYTES])[:_HEAD_BYTES]
        if self._room:
            more = piece[: self._room]
            self.value += more
            self._room -= len(more)
        if self._carried:
            piece = self._carried + piece
            self._carried = b""
        at = 0
        if self._in_string:
            end = _STRING_END.match(piece)
            if end is None:
                self._carry_backslash(piece)
                return
            self._in_string, at = False, end.end()
        self._walk(piece, at)

    def _walk(self, piece: bytes, at: int) -> None:
        """Walk from `at`, which is outside of strings."""
        outside, quote, unfinished = STRING.sub(b"", piece[at:]).partition(b'"')
        until = len(piece)
        if quote:
            until -= len(unfinished) + 1
            if len(unfinished) < CARRIED_BYTES:
                self._carried = piece[until:]
            else:
                self._in_string = True
                self._carry_backslash(unfinished)
        else:
            key = piece.rfind(self._name, max(at, until - CARRIED_BYTES))
            is_last = key >= 0 and not piece[key + len(self._name) :].strip()
            if is_last and (key == 0 or piece[key - 1] != 92):  # its colon may follow
                self._carried, until = piece[key:], key
        if piece.find(self._name, at, until) >= 0:
            at = self._find(piece, at, until)
            outside = STRING.sub(b"", piece[at:until])
        self.depth += _opened(outside)

    def _find(self, piece: bytes, at: int, until: int) -> int:
        """Look at each such key. Returns up to where brackets were counted."""
        for key in self._key.finditer(piece, at, until):
            if key.start() < at:
                continue
            self.depth += _opened(STRING.sub(b"", piece[at : key.start()]))
            at = key.start()
            if self.depth == 1 or (self.depth == 2 and _ENVELOPE.match(self._head) is not None):
                self.value = piece[key.end() : key.end() + VALUE_BYTES]
                self._room = VALUE_BYTES - len(self.value)
        return at

    def _carry_backslash(self, piece: bytes) -> None:
        """The character that the last backslash escapes is in the next piece."""
        if (len(piece) - len(piece.rstrip(b"\\"))) & 1:
            self._carried = b"\\"

    @property
    def is_complete(self) -> bool:
        """Every bracket and string that was opened is closed, and there was one."""
        return not (self.depth or self._in_string or self._carried) and self._head.lstrip(_BLANK)[:1] in _OPENING


def _opened(outside: bytes) -> int:
    """By how many levels the depth grows over this text, which has no strings."""
    return outside.count(b"{") + outside.count(b"[") - outside.count(b"}") - outside.count(b"]")
