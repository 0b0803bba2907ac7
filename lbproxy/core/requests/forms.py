# SPDX-License-Identifier: Apache-2.0
"""The `model` field of a multipart form (RFC 7578), which clients send with files.

The parts are walked from boundary to boundary, up to the end: OpenAI's own examples send the file before the model, and
a file may contain anything, even text that looks like a field. Each byte is read a bounded number of times, and parts
and their heads are bounded. The model server parses the form again, with another parser. So a form that parsers could
read differently (a part's head that violates the grammar) is treated as one without a model.

A large form is walked in many short steps (`FormWalk.step`), so that it does not hold up the event loop.
"""

from __future__ import annotations

import re
from typing import Final

from lbproxy.core.requests.openai import Naming, check_model_name
from lbproxy.core.requests.outcome import LbError, Outcome

MAX_PARTS: Final = 1000
MAX_PREAMBLE_BYTES: Final = 1 << 10
"""Before the first delimiter a form may have a text that is no part (RFC 2046, section 5.1.1): mostly an empty line."""
MAX_PART_HEAD_BYTES: Final = 16 << 10
MAX_LINES: Final = 32
"""Lines in the head of a part, and parameters in one line: clients send three of each."""
MAX_FALSE_DELIMITERS: Final = 10_000
"""Texts that look like a delimiter but are none. Boundaries are chosen so that files do not contain them: more of these
are an attack."""
MAX_VALUE_BYTES: Final = 4096
"""A longer value is not the name of a model, with or without blanks."""
STEP_BYTES: Final = 1 << 20
"""Searching this much takes 1 to 2 ms."""
PLACE_BYTES: Final = 1 << 10
"""What checking one text that looks like a delimiter costs, in bytes of search."""
PART_BYTES: Final = 32 << 10
"""What reading the head of a part costs, likewise."""
_BOUNDARY: Final = re.compile(rb";[ \t]*boundary=(?:\"([^\"\r\n]{1,70})\"|([^\s;,\"]{1,70}))")
_LINE_END: Final = re.compile(rb"[ \t]{0,1024}\r\n")
_ANY_LINE_END: Final = re.compile(rb"[ \t]{0,1024}[\r\n]|[ \t]{1024}")
"""Or more blanks than are checked: another parser may find a line end after them."""
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_FIELD_LINE: Final = re.compile(rb"(" + _TOKEN + rb"):[ \t]*+([^\x00-\x08\x0a-\x1f\x7f]*+)")
_PARAMETER: Final = re.compile(
    rb"[ \t]*+;[ \t]*+(" + _TOKEN + rb")=(?:\"((?:[^\"\\]|\\[^\r\n])*+)\"|(" + _TOKEN + rb"))[ \t]*+"
)
_FORM_DATA: Final = b"form-data"


def read_form_model(body: bytes, content_type: bytes, walk: FormWalk | None = None) -> str | None:
    """Return the value of the field; None if there is none, or the form is malformed.

    `content_type`: of the request, in lower case. `walk`: the finished walk over this form, if there is one. Raises
    LbError if the value is not a model name, or if there are two such fields.
    """
    span = _walked(body, content_type, walk).value
    if span is None:
        return None
    begin, end = span
    if end - begin > MAX_VALUE_BYTES:
        check_model_name("x" * MAX_VALUE_BYTES)
    model = body[begin:end].decode("utf-8", "replace").strip()
    check_model_name(model)
    return model


def find_form_name(body: bytes, content_type: bytes, walk: FormWalk | None = None) -> Naming:
    """Where the form names its model. `walk`: see above."""
    span = _walked(body, content_type, walk).value
    return Naming(() if span is None else (span,), is_json=False)


def is_clear(body: bytes, content_type: bytes, walk: FormWalk | None = None) -> bool:
    """Whether every parser reads the same in the form: it is not malformed. `walk`: see above."""
    return _walked(body, content_type, walk).is_clear


def _walked(body: bytes, content_type: bytes, walk: FormWalk | None) -> FormWalk:
    if walk is None:
        walk = FormWalk(body, content_type)
        while walk.step():
            pass
    return walk


class FormWalk:
    """The walk over one form, from delimiter to delimiter. It is finished when `step` returns False."""

    def __init__(self, body: bytes, content_type: bytes) -> None:
        self.value: tuple[int, int] | None = None
        """The start and end of the field's value, once the walk is finished."""
        self.is_clear = False
        """The walk came to the end of the form: every parser reads the same in it."""
        self._body = body
        self._delimiter = b""
        self._found: tuple[int, int] | None = None
        self._at = 0
        self._in_part = False
        self._parts = self._false_delimiters = 0
        self._name = b""
        self._value_at = 0
        self._ended = True
        named = _BOUNDARY.search(content_type)
        if named is not None:
            delimiter: bytes = b"--" + (named[1] or named[2])
            opening = body[: MAX_PREAMBLE_BYTES + len(delimiter)].lower()  # as the content type
            begin = opening.find(delimiter)
            self._at = begin + len(delimiter)
            self._delimiter = body[begin : self._at]  # as the body spells it
            self._ended = begin < 0 or not (begin == 0 or opening.endswith(b"\r\n", 0, begin))

    def step(self) -> bool:
        """Walk on for about `STEP_BYTES`. Returns whether more is left. Raises LbError if there are two such fields."""
        left = STEP_BYTES
        while left > 0 and not self._ended:
            if self._in_part:
                before = self._at
                self._search_part_end(left)
                left -= PLACE_BYTES + self._at - before
            else:
                self._read_part_head()
                left -= PART_BYTES
        return not self._ended

    def _read_part_head(self) -> None:
        body = self._body
        if self._parts == MAX_PARTS:
            self._ended = True
            return
        self._parts += 1
        if body.startswith(b"--", self._at):
            self.value, self.is_clear, self._ended = self._found, True, True
            return
        line_end = _LINE_END.match(body, self._at)
        head_end = (
            -1 if line_end is None else body.find(b"\r\n\r\n", line_end.end(), line_end.end() + MAX_PART_HEAD_BYTES)
        )
        name = None if line_end is None or head_end < 0 else _part_name(body[line_end.end() : head_end])
        if name is None:
            self._ended = True
            return
        self._name = name
        self._value_at = head_end + 4
        self._at = head_end + 2
        self._in_part = True

    def _search_part_end(self, size: int) -> None:
        """Search the next `size` bytes for the end of a part: a delimiter that every parser takes for one.

        Within a line, or as the start of a longer word, it is not a delimiter. Between single CRs or LFs only some
        parsers take it for one, so the form is malformed.
        """
        body, delimiter = self._body, self._delimiter
        stop = self._at + size
        begin = body.find(delimiter, self._at, stop + len(delimiter))
        if begin < 0:
            self._at = stop
            self._ended = stop >= len(body)
            return
        end = self._at = begin + len(delimiter)
        if body[begin - 1] in b"\r\n" and (body.startswith(b"--", end) or _ANY_LINE_END.match(body, end)):
            is_clear = body.startswith(b"\r\n", begin - 2) and (
                body.startswith(b"--", end) or _LINE_END.match(body, end) is not None
            )
            self._in_part, self._ended = False, not is_clear
            if is_clear and self._name == b"model":
                if self._found is not None:
                    raise LbError(Outcome.MISSING_MODEL, "The form has two fields `model`.", param="model")
                self._found = (self._value_at, max(self._value_at, begin - 2))
            return
        self._false_delimiters += 1
        self._ended = self._false_delimiters > MAX_FALSE_DELIMITERS


def _part_name(head: bytes) -> bytes | None:
    """Return the name of a part; empty for a file; None if parsers could read its head differently."""
    disposition = None
    lines = head.split(b"\r\n")
    if len(lines) > MAX_LINES:
        return None
    for line in lines:
        field = _FIELD_LINE.fullmatch(line)
        if field is None:
            return None
        if field[1].lower() == b"content-disposition":
            if disposition is not None:
                return None
            disposition = field[2]
    if disposition is None or disposition[: len(_FORM_DATA)].lower() != _FORM_DATA:
        return None
    values: dict[bytes, bytes] = {}
    at = len(_FORM_DATA)
    while at < len(disposition):
        parameter = _PARAMETER.match(disposition, at)
        if parameter is None or parameter[1].lower() in values or len(values) == MAX_LINES:
            return None
        values[parameter[1].lower()] = parameter[2] or parameter[3] or b""
        at = parameter.end()
    name = values.get(b"name")
    if name is None or b"\\" in name or b"name*" in values:
        return None
    if b"filename" in values or b"filename*" in values:
        return b"" if name != b"model" else None
    return name
