# SPDX-License-Identifier: Apache-2.0
"""The outline of a large JSON body: what parsing would cost, and a shorter text with the same content.

A JSON parser holds up the event loop from the first byte to the last. So a large body of which a count of its commas
and brackets does not show that it costs little is first walked in slices, between which other work gets its turn. The
walk takes ten times as long as to parse. It does four things:

- It finds what is outside of strings, which determines the cost: a key costs about as much as 150 bytes of text. Bodies
  above a limit are refused.
- It omits the middles of long strings (images, documents). A marker with their length and hash takes their place, so
  that prompts are distinguished, and counted, by all of their bytes (`omitted_bytes`).
- It cuts the text between two values of a list in the outermost object (messages, documents, token ids), so that it can
  be parsed in several turns (`LargeJson`).
- It notes the positions of the values of `model`, so that they can be replaced without another walk.

Invariants: the outline is valid JSON exactly if the body is, except for errors inside the omitted parts, which the
endpoint finds. It has the same keys and values, except for long strings. No value with a marker can be a model's name:
markers are not printable.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, Final

import orjson
import xxhash

from lbproxy.core.requests.outcome import LbError, Outcome

PARSE_AT_ONCE_BYTES: Final = 256 << 10
"""A body up to this size is parsed at once, whatever is in it: 12 ms if that is empty lists."""
SLICE_BYTES = 32 << 10
SLICES_AT_ONCE: Final = 8
"""About 1 ms of the event loop."""
STEP_COST: Final = 1_000_000
"""Or fewer slices, once they cost this much: structure takes longer to walk."""
STEP_STRINGS: Final = 8000
"""Or once they had so many strings, and texts between strings."""
KEPT_HEAD_BYTES = 256
"""How much of the beginning of a long string is kept."""
MIN_OMITTED_BYTES = 512
"""Shorter parts are not worth a marker."""
UNCUT_STRING_BYTES = 4 << 20
"""Up to this size a body's strings are complete: about a million tokens. Of a larger one half as much is, of long ones
together, so that with its markers it takes no longer to parse."""
MAX_DEPTH: Final = 900
"""How deep a request body may be nested. Python's own json, with which model servers parse it, takes 1000 levels less
the current stack depth; a server that fails on such a body would be blamed for it."""
MAX_COST: Final = 16_000_000
"""In bytes of plain text, each of which takes at most 2.5 ns to parse."""
MAX_SEGMENT_COST: Final = 7_500_000
"""The most that is parsed at once: at most 20 ms of the event loop."""
LITTLE_COST = 5_500_000
"""Of a longer one: 15 ms. Its structure is not told from what its strings have of the same characters: 1 MB of a coding
agent has 5,000,000."""
UNCOUNTED_BYTES = PARSE_AT_ONCE_BYTES
"""The same of a piece of a body. So it is cut where the next message begins after a quarter of that."""
SEARCHED_BYTES: Final = 256 << 10
"""How far a message is looked for, from a quarter of that on: 7 ms if all of it is brackets."""
SEGMENT_COST = 500_000
"""What is parsed at once costs so much, where the text can be cut."""
COSTS = ((b":", 140), (b"[", 105), (b"{", 75), (b",", 20))
"""What each costs in addition to its byte, in bytes of text: a key, a list, an object, one more value."""
_NO_STRUCTURE: Final = bytes(set(range(256)) - set(b":[{,"))
LIST_DEPTH: Final = 2
"""The depth of lists in the outermost object."""
_CUT: Final = re.compile(rb'(?:[^"\\]{8}|\\[bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4})(?=[^\x80-\xbf])')
"""Ends at a place where a string can be cut: not inside an escape or a character of several bytes, and not between a
pair of escapes that form one character (the first of which is \\ud800 to \\udbff). Behind `\\n` none of these is, even
if its backslash is itself escaped."""
_MODEL: Final = (
    rb'"(?:[mM]|\\u00[46][dD])(?:[oO]|\\u00[46][fF])(?:[dD]|\\u00[46]4)(?:[eE]|\\u00[46]5)(?:[lL]|\\u00[46][cC])"'
)
_MODEL_STRING: Final = re.compile(_MODEL)
_NO_BRACKETS: Final = frozenset((b":", b","))
MODEL_KEY: Final = re.compile(rb"(?<!\\)" + _MODEL + rb"[ \t\r\n]*:[ \t\r\n]*")
"""The key `model` in each of its spellings, anywhere in a valid JSON text; in other case too, as some servers do not
look at that. A quote that opens a string never follows a backslash. A quote that ends a string, and so only seems to
open `model`, is followed by a comma, colon or bracket."""
STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
MAX_MODEL_KEYS: Final = 1000
"""How often a body may name its model."""
MAX_KEY_BYTES: Final = 30
"""The longest spelling of the key `model`."""
MAX_MODEL_FIELD_BYTES: Final = 8 << 10
"""The key, a name in its longest spelling, and the blanks between them: a longer field is not read to its end."""
_BRACKET: Final = re.compile(rb"[\[\]{}]")
_MARKER: Final = re.compile(rb"\xef\xb7\x90([0-9]{1,8}):[0-9a-f]{16}\xef\xb7\x91")
"""Between U+FDD0 and U+FDD1, which are not characters: Unicode reserves them for a program's internal use."""
_NEXT_MESSAGE: Final = re.compile(
    rb'\}[ \t\r\n]*(,)[ \t\r\n]*\{[ \t\r\n]*"(?:role"|type"[ \t\r\n]*:[ \t\r\n]*"(?:message|function_call|reasoning))'
)
"""Between two messages, or items of /v1/responses. In a valid JSON text it stands in no string: its first quote would
end that, and no letter follows."""
ANSWER_COST: Final = 16 << 20
"""The most that JSON of an endpoint may cost, which is parsed at once: some 20 ms. 4,500 of vLLM's model cards."""
LENIENT_JSON_COST: Final = 4 << 20
"""Up to this cost a body that orjson refuses (NaN, lone surrogates) is parsed again by
the standard library, which is slower but accepts what the model servers' own parsers accept."""
_UTF8: Final = {"utf-8", "utf-8-sig"}
"""The encoding of JSON between systems (RFC 8259, section 8.1). Python's json would read UTF-16 too, other servers
would not, and bytes could not be inserted into it."""
_TOKEN: Final = secrets.token_hex(16)
_CONTINUED: Final = b'{"%b":["%b",' % (_TOKEN.encode(), _TOKEN.encode())
_UNFINISHED: Final = b',"%b"]}' % _TOKEN.encode()


class Outline:
    """The outline of one body. Call `step` until it returns False; then its attributes are complete."""

    def __init__(self, body: bytes) -> None:
        self.segments: list[bytes] = []
        """The kept text, cut at commas of lists in the outermost object; without these commas."""
        self.models: list[tuple[int, int]] = []
        """Positions in the body of the strings that are values of a `model` of the outermost object."""
        self.has_long_model = False
        """One of them is too long for a name, or has too many blanks around it. It is not in `models`."""
        self._body = body
        self._model_keys = 0
        self._at = 0
        self._in_string = False
        self._cost = 0
        self._cut_at_cost = 0
        self._uncut_left = UNCUT_STRING_BYTES // 2
        self._pieces: list[bytes] = []
        self._depth = 0
        self._in_object = False  # the outermost value is an object
        self._in_list = False  # the value at depth 2, if there is one, is a list

    def step(self) -> bool:
        """Walk on. Returns whether there is more. Raises LbError INVALID_JSON if the body would cost too much."""
        enough = self._cost + STEP_COST
        strings = 0
        for _ in range(SLICES_AT_ONCE):
            if self._at >= len(self._body) or self._cost > enough or strings > STEP_STRINGS:
                break
            strings += self._walk_slice()
        if self._cost > MAX_COST or self._cost - self._cut_at_cost > MAX_SEGMENT_COST:
            raise LbError(
                Outcome.INVALID_JSON, "The JSON body has too much structure, or too much text in short pieces."
            )
        if self._at < len(self._body):
            return True
        self.segments.append(b"".join(self._pieces))
        self._pieces = []
        return False

    def text(self) -> bytes:
        """The body without the middles of long strings."""
        return b",".join(self.segments)

    def _walk_slice(self) -> int:
        """Walk the next piece of the body. Returns how many strings it has, and texts between them."""
        piece = self._body[self._at : self._at + SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and len(piece) == SLICE_BYTES:
            piece = piece[:-1]  # do not cut an escape
        start = self._at
        self._at += len(piece)
        # All bytes stay at their positions, so that a position in one is the same position in the other.
        bare = piece.replace(b"\\\\", b"\0\0").replace(b'\\"', b"\0\0") if b"\\" in piece else piece
        parts = bare.split(b'"')
        self._find_models(start, bare, parts)
        between = b'"'.join(parts[self._in_string :: 2])
        self._cost += sum(cost * between.count(what) for what, cost in COSTS)
        longest = max(map(len, parts[not self._in_string :: 2]), default=0)
        may_cut = self._in_object and self._cost - self._cut_at_cost > SEGMENT_COST
        has_room = self._uncut_left > 0
        if has_room and longest > KEPT_HEAD_BYTES:
            self._uncut_left -= len(piece)
        omits = longest > MIN_OMITTED_BYTES and not has_room
        cut = self._follow_brackets(between, may_cut=may_cut)
        if omits or cut >= 0:
            self._shorten(piece, parts, cut if cut < 0 else _position(parts, between, cut, inside=self._in_string))
        else:
            self._pieces.append(piece)
            self._cost += len(piece)
        self._in_string ^= len(parts) % 2 == 0
        return len(parts)

    def _find_models(self, start: int, bare: bytes, parts: list[bytes]) -> None:
        """Note the values of `model` whose keys begin in a piece of the body that begins at `start`. `bare`: the piece
        without escaped quotes; `parts`: the texts between its quotes.
        """
        may_end_inside = len(parts[-1]) <= MAX_KEY_BYTES and self._in_string == (len(parts) % 2 == 1)
        found: set[int] = set()
        if b'model"' in bare.lower() or b"\\u00" in bare:
            found = {start + one.start() for one in _MODEL_STRING.finditer(bare)}
        if may_end_inside:
            found.add(start + len(bare) - len(parts[-1]) - 1)
        if not found:
            return
        depth, inside, at = self._depth, self._in_string, start
        for part in parts:
            if not inside:
                if part not in _NO_BRACKETS:
                    depth += part.count(b"{") + part.count(b"[") - part.count(b"}") - part.count(b"]")
            elif depth == 1 and at > start and at - 1 in found:
                self._note_model(at - 1)
            at += len(part) + 1
            inside = not inside

    def _note_model(self, at: int) -> None:
        """Note the value after a string of the outermost object that begins at `at`, if the string is the key `model`.
        Raises LbError INVALID_JSON if there are too many of them.
        """
        if _MODEL_STRING.match(self._body, at) is None:
            return
        self._model_keys += 1
        if self._model_keys > MAX_MODEL_KEYS:
            raise LbError(Outcome.INVALID_JSON, f"The JSON body has more than {MAX_MODEL_KEYS} keys `model`.")
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

    def _shorten(self, piece: bytes, parts: list[bytes], cut: int) -> None:
        """Omit long strings in a piece, and end a segment at its comma at `cut` unless that is -1. `parts`: the texts
        between its quotes.
        """
        inside = self._in_string
        begun = inside  # it began in an earlier slice
        start = written = 0  # positions in `piece`
        for part in parts if self._uncut_left <= 0 else ():
            end = start + len(part)
            if inside and len(part) > MIN_OMITTED_BYTES:
                if 0 <= cut < start:
                    written, cut = self._end_segment(piece, written, cut), -1
                written = self._omit(piece, written, start if begun else start + KEPT_HEAD_BYTES, end)
            begun = False
            start = end + 1
            inside = not inside
        if cut >= 0:
            written = self._end_segment(piece, written, cut)
        self._pieces.append(piece[written:])
        self._cost += len(piece) - written

    def _end_segment(self, piece: bytes, written: int, cut: int) -> int:
        """End the segment at the comma at `cut`. Returns the position up to which the piece is done."""
        self._pieces.append(piece[written:cut])
        self._cost += cut - written
        self.segments.append(b"".join(self._pieces))
        self._pieces = []
        self._cut_at_cost = self._cost
        return cut + 1

    def _omit(self, piece: bytes, written: int, start: int, end: int) -> int:
        """Omit about `piece[start:end]`, a part of a string. Returns the position up to which the piece is done:
        `written` if nothing was omitted.
        """
        first = _CUT.search(piece, start, end)
        last = _CUT.search(piece, max(start, end - MIN_OMITTED_BYTES // 4), end)
        if first is None or last is None or last.end() - first.end() < MIN_OMITTED_BYTES:
            return written
        out = piece[first.end() : last.end()]
        self._pieces.append(piece[written : first.end()])
        self._pieces.append(b"\xef\xb7\x90%d:%016x\xef\xb7\x91" % (len(out), xxhash.xxh3_64_intdigest(out)))
        self._cost += first.end() - written
        return last.end()

    def _follow_brackets(self, between: bytes, *, may_cut: bool) -> int:
        """Follow the brackets in the text outside of strings. Returns the position there of the comma to cut at; -1:
        none.
        """
        comma = -1
        at = 0
        for bracket in _BRACKET.finditer(between):
            if may_cut and comma < 0 and self._in_list and self._depth == LIST_DEPTH:
                comma = between.find(b",", at, bracket.start())
            self._follow_bracket(bracket[0])
            at = bracket.end()
        if may_cut and comma < 0 and self._in_list and self._depth == LIST_DEPTH:
            comma = between.find(b",", at)
        return comma

    def _follow_bracket(self, bracket: bytes) -> None:
        if bracket in {b"[", b"{"}:
            self._depth += 1
            if self._depth == 1:
                if bracket == b"[":
                    raise not_an_object()
                self._in_object = True
            elif self._depth == LIST_DEPTH:
                self._in_list = bracket == b"["
            elif self._depth > MAX_DEPTH:
                raise too_deep()
        else:
            self._depth -= 1


def _position(parts: list[bytes], between: bytes, at: int, *, inside: bool) -> int:
    """The position in a piece of what is at `at` in its text outside of strings. `parts`: the texts between its quotes,
    of which the first is `inside` a string or not; `between`: those outside, with a quote for each string.
    """
    begin = between.rfind(b'"', 0, at) + 1
    before = 2 * between.count(b'"', 0, at) + inside
    return sum(map(len, parts[:before])) + before + at - begin


def omitted_bytes(prompt: bytes, body_bytes: int) -> int:
    """How many bytes were omitted from a prompt whose body had `body_bytes` bytes. A client that forges markers can add
    at most the size of its body.
    """
    return min(sum(int(mark[1]) for mark in _MARKER.finditer(prompt)), body_bytes)


def too_deep() -> LbError:
    """The error for a body that is nested deeper than `MAX_DEPTH`."""
    return LbError(Outcome.INVALID_JSON, f"The request body is nested deeper than {MAX_DEPTH} levels.")


def not_an_object() -> LbError:
    """The error for a body that is JSON of another kind."""
    return LbError(Outcome.INVALID_JSON, "The request body must be a JSON object.")


def outline(body: bytes) -> Outline:
    """The outline of `body`, made at once: for callers that may block. Raises LbError."""
    whole = Outline(body)
    while whole.step():
        pass
    return whole


def cost(text: bytes) -> int:
    """The most that parsing may cost, in bytes of plain text."""
    structure = text.translate(None, _NO_STRUCTURE)  # half as long as to count four times in the text
    return len(text) + sum(each * structure.count(what) for what, each in COSTS)


def next_piece(body: bytes, begin: int) -> tuple[memoryview, int] | None:
    """The piece of a body from `begin` up to a following message, and where that begins (0: there is none). It may be
    parsed at once: without a look at what is in it if it is short. Whether it ends between elements of a list in the
    outermost object shows when all pieces are parsed. None: the body takes an outline.
    """
    cut = None
    if len(body) - begin > UNCOUNTED_BYTES:
        cut = _NEXT_MESSAGE.search(body, begin + UNCOUNTED_BYTES // 4, begin + SEARCHED_BYTES)
    end, following = (len(body), 0) if cut is None else cut.span(1)
    text = memoryview(body)[begin:end]
    is_light = len(text) <= UNCOUNTED_BYTES or cost(bytes(text)) <= LITTLE_COST
    return (text, following) if is_light else None


def is_light(text: bytes) -> bool:
    """Whether JSON that an endpoint sent may be parsed: 4 MB of empty lists would take half a second."""
    return cost(text) <= ANSWER_COST


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
    """A large JSON body, parsed in as few turns of the event loop as are short.

    It is parsed one segment a turn. A segment ends at a comma in a list that is a value of the outermost object; the
    next segment continues that list. Each segment is completed to valid JSON: a value of `_TOKEN` is put at the open
    end of the list, and a continued list is given that name and starts with such a value. Since a comma needs a value
    on either side, the segments are valid JSON exactly if the body is, and exactly if they end at such commas. Clients
    cannot guess the token. So the places to cut need not be sure (`next_piece`); if orjson refuses a segment, or that
    might cost much, the body is outlined first (`Outline`).

    One large body. Call `step` until it returns False; then `value` and `outline` are complete.
    """

    def __init__(self, body: bytes) -> None:
        self.value: object = None
        """The parsed body, with markers in long strings."""
        self.outline = Outline(body) if len(body) > UNCUT_STRING_BYTES else None
        """None: it was parsed without one."""
        self._body = body
        self._segments: list[bytes] = []
        """Of the outline, once that is complete."""
        self._at = 0
        """The next segment: where it begins in the body, or its number in the outline."""
        self._open: list[Any] = []
        """The list that is open at the end of the last segment."""

    def step(self) -> bool:
        """Outline some more of the body, or parse one segment. Returns whether there is more to do. Raises LbError
        INVALID_JSON.
        """
        outline, at = self.outline, self._at
        if outline is None:
            piece = next_piece(self._body, at)
            if piece is not None:
                text, self._at = piece
                try:
                    self._parse(text, is_first=at == 0, is_last=not self._at)
                except orjson.JSONDecodeError:
                    piece = None
            if piece is None:
                self._at, self.outline = 0, Outline(self._body)
            return piece is None or self._at > 0
        if not self._segments:
            if not outline.step():
                self._segments = outline.segments
            return True
        self._at += 1
        is_last = self._at == len(self._segments)
        self._parse(self._segments[at], is_first=at == 0, is_last=is_last)
        return not is_last

    def _parse(self, text: bytes | memoryview, *, is_first: bool, is_last: bool) -> None:
        """Parse a segment. Raises orjson.JSONDecodeError, or with an outline LbError."""
        if not (is_first and is_last):
            text = b"".join((b"" if is_first else _CONTINUED, text, b"" if is_last else _UNFINISHED))
        parsed = orjson.loads(text) if self.outline is None else load_json(bytes(text))
        if is_first:
            self.value = parsed
        if not (is_first and is_last):
            assert isinstance(parsed, dict)
            self._join(parsed, is_continued=not is_first, is_open=not is_last)

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
