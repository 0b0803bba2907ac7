"""A large JSON body, looked at before it is parsed: what parsing would cost, and a shorter text that says the same.

A JSON parser holds the event loop from the first byte to the last. So a body that is large is first walked in slices,
between which others have their turn. The walk finds what stands outside of strings, which is what costs: a key about
as much as 150 bytes of text. More than a bound is refused. And it leaves out the middles of long strings (images,
documents), of which nothing is read but how they begin.

Invariants: what is left is JSON exactly if the body was, but for what is wrong inside the parts left out, which the
endpoint judges; it has the same keys and values, strings longer than `SLICE_BYTES` apart, which stay longer than any
name can be.
"""

from __future__ import annotations

import re
from typing import Final

from lbproxy.core.types import LbError, Outcome

WHOLE_BYTES: Final = 256 << 10
"""A body up to here is parsed at once: the worst of this size takes 35 ms."""
SLICE_BYTES = 32 << 10
SLICES_AT_ONCE: Final = 8
"""About 1 ms of the loop, 4 ms at worst."""
KEPT_HEAD_BYTES = 2 << 10
"""What is left of a slice of a string, at least: more than `MAX_MODEL_CHARS`, however they are written."""
KEPT_BYTES = 2 << 20
"""So much of long strings is left whole: prompts are told apart by how they begin."""
MAX_COST: Final = 16_000_000
"""In bytes of plain text, each about 2.5 ns: 40 ms of the loop."""
COSTS = ((b":", 140), (b"[", 105), (b"{", 75), (b",", 20))
"""What each costs more than its byte, in bytes of text: a key, a list, an object, one more value."""
_PLAIN: Final = re.compile(rb"[ !#-\[\]-\x7e]{8}")
"""Where a string can be cut: no escape is longer, and no character of several bytes is among them."""


class Outline:
    """One body. `step` until it says that all was seen, then `text`."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0
        self._in_string = False
        self._cost = 0
        self._room = KEPT_BYTES
        self._left: list[bytes] = []

    def step(self) -> bool:
        """Look at some more. Returns whether there is more. Raises LbError INVALID_JSON: it would cost too much."""
        for _ in range(SLICES_AT_ONCE):
            if self._at >= len(self._body):
                break
            self._slice()
        if self._cost > MAX_COST:
            raise LbError(
                Outcome.INVALID_JSON, "The JSON body has too much structure, or too much text in short pieces."
            )
        return self._at < len(self._body)

    def text(self) -> bytes:
        """The body without the middles of long strings."""
        return b"".join(self._left)

    def _slice(self) -> None:
        piece = self._body[self._at : self._at + SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) == SLICE_BYTES:
            piece = piece[:-1]  # an escape is not cut
        self._at += len(piece)
        bare = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
        parts = bare.split(b'"')
        if len(parts) == 1 and self._in_string:
            piece = self._shortened(piece)
        else:
            outside = b"".join(parts[self._in_string :: 2])
            self._cost += sum(cost * outside.count(what) for what, cost in COSTS)
            self._in_string ^= len(parts) % 2 == 0
        self._cost += len(piece)
        self._left.append(piece)

    def _shortened(self, piece: bytes) -> bytes:
        """A piece out of the middle of a string: its beginning and its end, if it can be cut there."""
        if self._room > 0:
            self._room -= len(piece)
            return piece
        first = _PLAIN.search(piece, KEPT_HEAD_BYTES)
        last = _PLAIN.search(piece, max(0, len(piece) - KEPT_HEAD_BYTES))
        if first is None or last is None or first.end() >= last.end():
            return piece
        return piece[: first.end()] + piece[last.end() :]


def outline(body: bytes) -> bytes:
    """All of it at once, for those who have the time. Raises LbError."""
    whole = Outline(body)
    while whole.step():
        pass
    return whole.text()


def cost(text: bytes) -> int:
    """What parsing may cost at most, in bytes of plain text."""
    return len(text) + sum(each * text.count(what) for what, each in COSTS)
