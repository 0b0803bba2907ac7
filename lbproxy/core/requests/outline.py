"""A large JSON body, looked at before it is parsed: what parsing would cost, and a shorter text that says the same.

A JSON parser holds the event loop from the first byte to the last. So a body that is large is first walked in slices,
between which others have their turn. The walk does four things:

- It finds what stands outside of strings, which is what costs: a key about as much as 150 bytes of text. More than a
  bound is refused.
- It leaves out the middles of long strings (images, documents). In their place stands a mark with their length and
  their hash, so that prompts are told apart, and counted, by all of their bytes (`bytes_left_out`).
- It cuts the text between two values of a list of the outermost object (messages, documents, token ids), so that it can
  be parsed in several turns too (`core.requests.large_json`).
- It notes where the values of `model` stand, so that they can be replaced without another walk.

Invariants: what is left is JSON exactly if the body was, but for what is wrong inside the parts left out, which the
endpoint judges; it has the same keys and values, long strings apart. None of those is a name: marks cannot be printed.
"""

from __future__ import annotations

import re
from typing import Final

import xxhash

from lbproxy.core.requests.outcome import LbError, Outcome

WHOLE_BYTES: Final = 256 << 10
"""A body up to here is parsed at once: the worst of this size takes 35 ms."""
SLICE_BYTES = 32 << 10
SLICES_AT_ONCE: Final = 8
"""About 1 ms of the loop."""
STEP_COST: Final = 1_000_000
"""Or as many as cost so much: to walk structure takes longer."""
KEPT_HEAD_BYTES = 256
"""How much of a long string's beginning is left."""
LEFT_OUT_BYTES = 512
"""Less is not worth a mark."""
KEPT_BYTES = 4 << 20
"""So much of long strings is left whole: about a million tokens."""
MAX_DEPTH: Final = 900
"""How deep a request body is nested at most. Python's own json, which model servers read it with, takes no more than
1000 less what stands on its stack, and a server that fails over a body would be blamed for it."""
MAX_COST: Final = 16_000_000
"""In bytes of plain text, each at most 2.5 ns to parse."""
MAX_SEGMENT_COST: Final = 7_500_000
"""Of what is parsed at once: at most 20 ms of the loop."""
SEGMENT_COST = 500_000
"""Of what is parsed at once where it can be cut."""
COSTS = ((b":", 140), (b"[", 105), (b"{", 75), (b",", 20))
"""What each costs more than its byte, in bytes of text: a key, a list, an object, one more value."""
LIST_DEPTH: Final = 2
"""Of the values of the outermost object."""
_CUT: Final = re.compile(rb'(?:[^"\\]{8}|\\u(?![dD][89abAB])[0-9a-fA-F]{4})(?=[^\x80-\xbf])')
"""Ends where a string can be cut: no escape goes on, no character of several bytes, and no pair of escapes that is one
character (the first of which is \\ud800 to \\udbff)."""
MODEL_KEY: Final = re.compile(
    rb'"(?<!\\")(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"[ \t\r\n]*:[ \t\r\n]*'
)
"""The key `model` in each of its spellings, wherever in a valid JSON text. A quote that opens a string never follows a
backslash; one that ends it, and so might only seem to open `model`, is followed by a comma, colon or bracket."""
STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
MAX_KEY_BYTES: Final = 30
"""Of `model`, in its longest spelling."""
MAX_MODEL_FIELD_BYTES: Final = 8 << 10
"""Of the key, a name in its longest spelling, and the blanks between: what is longer is not looked at to its end."""
_BRACKET: Final = re.compile(rb"[\[\]{}]")
_MARK: Final = re.compile(rb"\xef\xb7\x90([0-9]{1,8}):[0-9a-f]{16}\xef\xb7\x91")
"""Between U+FDD0 and U+FDD1, which are no characters: Unicode keeps them for a program's own use."""


class Outline:
    """One body. `step` until it says that all was seen, then `segments` and `text`."""

    def __init__(self, body: bytes) -> None:
        self.segments: list[bytes] = []
        """What is left, cut at commas of lists that are values of the outermost object; the commas are in none."""
        self.models: list[tuple[int, int]] = []
        """Where in the body the strings stand that are values of a `model` of the outermost object."""
        self.has_long_model = False
        """One of them is too long for a name, or has too many blanks around it; it is not in `models`."""
        self._body = body
        self._at = 0
        self._in_string = False
        self._cost = 0
        self._cut_at_cost = 0
        self._room = KEPT_BYTES
        self._left: list[bytes] = []
        self._depth = 0
        self._in_object = False  # the outermost value is one
        self._in_list = False  # so is that of depth 2, when there is one

    def step(self) -> bool:
        """Look at some more. Returns whether there is more. Raises LbError INVALID_JSON: it would cost too much."""
        enough = self._cost + STEP_COST
        for _ in range(SLICES_AT_ONCE):
            if self._at >= len(self._body) or self._cost > enough:
                break
            self._slice()
        if self._cost > MAX_COST or self._cost - self._cut_at_cost > MAX_SEGMENT_COST:
            raise LbError(
                Outcome.INVALID_JSON, "The JSON body has too much structure, or too much text in short pieces."
            )
        if self._at < len(self._body):
            return True
        self.segments.append(b"".join(self._left))
        self._left = []
        return False

    def text(self) -> bytes:
        """The body without the middles of long strings."""
        return b",".join(self.segments)

    def _slice(self) -> None:
        """Walk the next piece of the body."""
        piece = self._body[self._at : self._at + SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) == SLICE_BYTES:
            piece = piece[:-1]  # an escape is not cut
        start = self._at
        self._at += len(piece)
        # Each byte stays where it is, so that a place in one is the same place in the other.
        bare = piece.replace(b"\\\\", b"\0\0").replace(b'\\"', b"\0\0") if b"\\" in piece else piece
        parts = bare.split(b'"')
        ends_inside = self._in_string == (len(parts) % 2 == 1)
        if b'model"' in bare or b"\\u006" in bare or (ends_inside and len(parts[-1]) <= MAX_KEY_BYTES):
            self._find_models(start, parts)
        outside = b"".join(parts[self._in_string :: 2])
        self._cost += sum(cost * outside.count(what) for what, cost in COSTS)
        longest = max(map(len, parts[not self._in_string :: 2]), default=0)
        is_ripe = self._in_object and self._cost - self._cut_at_cost > SEGMENT_COST
        has_room = self._room > 0
        if has_room and longest > KEPT_HEAD_BYTES:
            self._room -= len(piece)
        if is_ripe or (longest > LEFT_OUT_BYTES and not has_room):
            self._cut(piece, parts, is_ripe=is_ripe)
        else:
            for bracket in _BRACKET.findall(outside):
                self._nest(bracket)
            self._left.append(piece)
            self._cost += len(piece)
            self._in_string ^= len(parts) % 2 == 0

    def _find_models(self, start: int, parts: list[bytes]) -> None:
        """Note the values of `model` whose keys begin in a piece of the body that begins at `start`."""
        depth, inside, at = self._depth, self._in_string, start
        for part in parts:
            if not inside:
                depth += part.count(b"{") + part.count(b"[") - part.count(b"}") - part.count(b"]")
            elif depth == 1 and at > start and len(part) <= MAX_KEY_BYTES:
                self._note_model(at - 1)
            at += len(part) + 1
            inside = not inside

    def _note_model(self, at: int) -> None:
        """A string of the outermost object begins at `at`: note the value behind it, if it is the key `model`."""
        end = at + MAX_MODEL_FIELD_BYTES
        key = MODEL_KEY.match(self._body, at, end)
        if key is None:
            self.has_long_model |= MODEL_KEY.match(self._body[at:end].rstrip(b" \t\r\n") + b":") is not None
            return
        value = STRING.match(self._body, key.end(), end)
        if value is not None:
            self.models.append((value.start(), value.end()))
        elif key.end() == end or self._body.startswith(b'"', key.end()):
            self.has_long_model = True

    def _cut(self, piece: bytes, parts: list[bytes], *, is_ripe: bool) -> None:
        """Leave long strings out of a piece, and end a segment in it, if that `is_ripe`. `parts` are between quotes."""
        begun = self._in_string  # in an earlier slice
        start = written = 0  # of `piece`
        for part in parts:
            end = start + len(part)
            if not self._in_string:
                comma = self._outside(part, is_ripe=is_ripe)
                if comma >= 0:
                    self._left.append(piece[written : start + comma])
                    written = start + comma + 1
                    self.segments.append(b"".join(self._left))
                    self._left = []
                    self._cut_at_cost = self._cost
                    is_ripe = False
            elif self._room <= 0 and len(part) > LEFT_OUT_BYTES:
                written = self._leave_out(piece, written, start if begun else start + KEPT_HEAD_BYTES, end)
            begun = False
            start = end + 1
            self._in_string = not self._in_string
        self._in_string = not self._in_string  # no quote follows the last part
        self._left.append(piece[written:])
        self._cost += len(piece) - written

    def _leave_out(self, piece: bytes, written: int, start: int, end: int) -> int:
        """Leave out of a string what stands in `piece` from `start` to `end`, about. Returns up to where the piece is
        dealt with: `written` if there is nothing to leave out.
        """
        first = _CUT.search(piece, start, end)
        last = _CUT.search(piece, max(start, end - LEFT_OUT_BYTES // 4), end)
        if first is None or last is None or last.end() - first.end() < LEFT_OUT_BYTES:
            return written
        out = piece[first.end() : last.end()]
        self._left.append(piece[written : first.end()])
        self._left.append(b"\xef\xb7\x90%d:%016x\xef\xb7\x91" % (len(out), xxhash.xxh3_64_intdigest(out)))
        self._cost += first.end() - written
        return last.end()

    def _outside(self, part: bytes, *, is_ripe: bool) -> int:
        """Follow what is opened and closed outside of strings. Returns at which comma to cut; -1 = nowhere."""
        comma = -1
        at = 0
        for bracket in _BRACKET.finditer(part):
            place = bracket.start()
            if is_ripe and comma < 0 and self._in_list and self._depth == LIST_DEPTH:
                comma = part.find(b",", at, place)
            self._nest(bracket[0])
            at = place + 1
        if is_ripe and comma < 0 and self._in_list and self._depth == LIST_DEPTH:
            comma = part.find(b",", at)
        return comma

    def _nest(self, bracket: bytes) -> None:
        if bracket in {b"[", b"{"}:
            self._depth += 1
            if self._depth == 1:
                self._in_object = bracket == b"{"
            elif self._depth == LIST_DEPTH:
                self._in_list = bracket == b"["
            elif self._depth > MAX_DEPTH:
                raise too_deep()
        else:
            self._depth -= 1


def bytes_left_out(prompt: bytes, body_bytes: int) -> int:
    """How much longer a prompt is whose body, of so many bytes, was outlined. Whoever writes such marks himself adds no
    more than his body has.
    """
    return min(sum(int(mark[1]) for mark in _MARK.finditer(prompt)), body_bytes)


def too_deep() -> LbError:
    """What a body is told that is nested deeper than `MAX_DEPTH`."""
    return LbError(Outcome.INVALID_JSON, f"The request body is nested deeper than {MAX_DEPTH} levels.")


def outline(body: bytes) -> Outline:
    """All of it at once, for those who have the time. Raises LbError."""
    whole = Outline(body)
    while whole.step():
        pass
    return whole


def cost(text: bytes) -> int:
    """What parsing may cost at most, in bytes of plain text."""
    return len(text) + sum(each * text.count(what) for what, each in COSTS)
