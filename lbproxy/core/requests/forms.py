"""The `model` field of a multipart form (RFC 7578), which clients send with files.

The parts are walked from boundary to boundary to the end: OpenAI's own examples send the file before the model, and a
file may hold anything, also what looks like a field. Each byte is looked at a fixed number of times, and parts and
their heads are bounded. The model server reads the form again, by another parser: so one that parsers could read
differently, for a part's head that is not as the grammar has it, has no model here.

A large form is walked in many short steps (`FormWalk.step`), so that nothing holds the event loop for long.
"""

from __future__ import annotations

import re
from typing import Final

from lbproxy.core.requests.openai import Pieces, check_model_name, replaced
from lbproxy.core.requests.outcome import LbError, Outcome

MAX_PARTS: Final = 1000
MAX_PART_HEAD_BYTES: Final = 16 << 10
MAX_FALSE_DELIMITERS: Final = 10_000
"""Places that look like a delimiter and are none. Boundaries are made so that no file has them: more are an attack."""
MAX_VALUE_BYTES: Final = 4096
"""A longer value is no model's name, whatever blanks it has."""
STEP_BYTES: Final = 1 << 20
"""To search so much takes 1 to 2 ms."""
PLACE_BYTES: Final = 1 << 10
"""To look at one place that looks like a delimiter takes as long as to search so much,"""
PART_BYTES: Final = 32 << 10
"""and to read the head of a part."""
_BOUNDARY: Final = re.compile(rb";[ \t]*boundary=(?:\"([^\"\r\n]{1,70})\"|([^\s;,\"]{1,70}))")
_LINE_END: Final = re.compile(rb"[ \t]{0,1024}\r\n")
_ANY_LINE_END: Final = re.compile(rb"[ \t]{0,1024}[\r\n]|[ \t]{1024}")
"""Or more blanks than are looked at: some parser may find a line end behind them."""
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_FIELD_LINE: Final = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_PARAMETER: Final = re.compile(
    rb"[ \t]*;[ \t]*(" + _TOKEN + rb")=(?:\"((?:[^\"\\]|\\[^\r\n])*)\"|(" + _TOKEN + rb"))[ \t]*"
)
_FORM_DATA: Final = b"form-data"


def read_form_model(body: bytes, content_type: bytes, walk: FormWalk | None = None) -> str | None:
    """The value of the field. `content_type`: the request's, in lower case; `walk`: over this form, if it was walked
    already. None if there is none, or the form is malformed. Raises LbError if it is no name, or there are two.
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


def rename_form_model(body: bytes, content_type: bytes, model: str, walk: FormWalk | None = None) -> Pieces:
    """A form with another model in that field; all other bytes unchanged. `walk`: see `read_form_model`."""
    span = _walked(body, content_type, walk).value
    return replaced(body, [] if span is None else [span], model.encode())


def _walked(body: bytes, content_type: bytes, walk: FormWalk | None) -> FormWalk:
    if walk is None:
        walk = FormWalk(body, content_type)
        while walk.step():
            pass
    return walk


class FormWalk:
    """The walk over one form, from delimiter to delimiter. It is over when `step` returns False."""

    def __init__(self, body: bytes, content_type: bytes) -> None:
        self.value: tuple[int, int] | None = None
        """From where to where the field's value goes, once the walk is over."""
        self._body = body
        self._delimiter = b""
        self._found: tuple[int, int] | None = None
        self._at = 0
        self._in_part = False
        self._parts = self._false = 0
        self._name = b""
        self._value_at = 0
        self._ended = True
        named = _BOUNDARY.search(content_type)
        if named is not None:
            boundary: bytes = named[1] or named[2]
            self._at = 2 + len(boundary)
            self._delimiter = body[: self._at]  # as the body writes it: the content type lost its capitals
            self._ended = self._delimiter.lower() != b"--" + boundary

    def step(self) -> bool:
        """Go on for about `STEP_BYTES`. Returns whether there is more. Raises LbError if there are two such fields."""
        left = STEP_BYTES
        while left > 0 and not self._ended:
            if self._in_part:
                before = self._at
                self._search(left)
                left -= PLACE_BYTES + self._at - before
            else:
                self._open()
                left -= PART_BYTES
        return not self._ended

    def _open(self) -> None:
        """Read the head of the part behind a delimiter, or the end of the form."""
        body = self._body
        if self._parts == MAX_PARTS:
            self._ended = True
            return
        self._parts += 1
        if body.startswith(b"--", self._at):
            self.value, self._ended = self._found, True
            return
        line_end = _LINE_END.match(body, self._at)
        head_end = (
            -1 if line_end is None else body.find(b"\r\n\r\n", line_end.end(), line_end.end() + MAX_PART_HEAD_BYTES)
        )
        name = None if line_end is None or head_end < 0 else _name_of(body[line_end.end() : head_end])
        if name is None:
            self._ended = True
            return
        self._name = name
        self._value_at = head_end + 4
        self._at = head_end + 2
        self._in_part = True

    def _search(self, size: int) -> None:
        """Look for the end of a part in so many bytes: a delimiter that is one for every parser. Within a line, or as
        the beginning of a longer word, it is none. Between single CRs or LFs it is one for some: the form is malformed.
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
        self._false += 1
        self._ended = self._false > MAX_FALSE_DELIMITERS


def _name_of(head: bytes) -> bytes | None:
    """What a part is called; empty for one that is a file. None if parsers could differ about its head."""
    disposition = None
    for line in head.split(b"\r\n"):
        field = _FIELD_LINE.fullmatch(line)
        if field is None:
            return None
        if field[1].lower() == b"content-disposition":
            if disposition is not None:
                return None
            disposition = field[2]
    if disposition is None or not disposition.startswith(_FORM_DATA):
        return None
    values: dict[bytes, bytes] = {}
    at = len(_FORM_DATA)
    while at < len(disposition):
        parameter = _PARAMETER.match(disposition, at)
        if parameter is None or parameter[1].lower() in values:
            return None
        values[parameter[1].lower()] = parameter[2] or parameter[3] or b""
        at = parameter.end()
    name = values.get(b"name")
    if name is None or b"\\" in name or b"name*" in values:
        return None
    if b"filename" in values or b"filename*" in values:
        return b"" if name != b"model" else None
    return name
