"""The `model` field of a multipart form (RFC 7578), which clients send with files.

The parts are walked from boundary to boundary to the end: OpenAI's own examples send the file before the model, and a
file may hold anything, also what looks like a field. Each byte is looked at a fixed number of times, and parts and
their heads are bounded. The model server reads the form again, by another parser: so one that parsers could read
differently, for a part's head that is not as the grammar has it, has no model here.
"""

from __future__ import annotations

import re
from typing import Final

from lbproxy.core.requests.openai import check_model_name
from lbproxy.core.requests.outcome import LbError, Outcome

MAX_PARTS: Final = 1000
MAX_PART_HEAD_BYTES: Final = 16 << 10
_BOUNDARY: Final = re.compile(rb";[ \t]*boundary=(?:\"([^\"\r\n]{1,70})\"|([^\s;,\"]{1,70}))")
_LINE_END: Final = re.compile(rb"[ \t]*\r\n")
_ANY_LINE_END: Final = re.compile(rb"[ \t]*[\r\n]")
_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_FIELD_LINE: Final = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_PARAMETER: Final = re.compile(
    rb"[ \t]*;[ \t]*(" + _TOKEN + rb")=(?:\"((?:[^\"\\]|\\[^\r\n])*)\"|(" + _TOKEN + rb"))[ \t]*"
)
_FORM_DATA: Final = b"form-data"


def read_form_model(body: bytes, content_type: bytes) -> str | None:
    """The value of the field. `content_type`: the request's, in lower case. None if there is none, or the form is
    malformed. Raises LbError if it is no name, or there are two.
    """
    span = _model_value(body, content_type)
    if span is None:
        return None
    model = body[span[0] : span[1]].decode("utf-8", "replace").strip()
    check_model_name(model)
    return model


def rename_form_model(body: bytes, content_type: bytes, model: str) -> bytes:
    """A form with another model in that field; all other bytes unchanged."""
    span = _model_value(body, content_type)
    return body if span is None else b"".join((body[: span[0]], model.encode(), body[span[1] :]))


def _model_value(body: bytes, content_type: bytes) -> tuple[int, int] | None:
    """From where to where the field's value goes."""
    named = _BOUNDARY.search(content_type)
    if named is None:
        return None
    at = 2 + len(named[1] or named[2])
    delimiter = body[:at]  # as the body writes it: the content type lost its capitals
    if delimiter.lower() != b"--" + (named[1] or named[2]):
        return None
    found = None
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            return found
        line_end = _LINE_END.match(body, at)
        if line_end is None:
            return None
        begin = line_end.end()
        head_end = body.find(b"\r\n\r\n", begin, begin + MAX_PART_HEAD_BYTES)
        name = None if head_end < 0 else _name_of(body[begin:head_end])
        end, at = _next_delimiter(body, delimiter, head_end + 2)
        if name is None or end < 0:
            return None
        if name == b"model":
            if found is not None:
                raise LbError(Outcome.MISSING_MODEL, "The form has two fields `model`.", param="model")
            found = (head_end + 4, max(head_end + 4, end))
    return None


def _next_delimiter(body: bytes, delimiter: bytes, at: int) -> tuple[int, int]:
    """Where the next one begins, with its CRLF, and where it ends. -1 if there is none, or one that only some parsers
    would take for one, as it stands between single CRs or LFs. Within a line, or as the beginning of a longer word, it
    is none.
    """
    while (begin := body.find(delimiter, at)) >= 0:
        end = begin + len(delimiter)
        if body[begin - 1] in b"\r\n" and (body.startswith(b"--", end) or _ANY_LINE_END.match(body, end)):
            is_clear = body.startswith(b"\r\n", begin - 2) and (
                body.startswith(b"--", end) or _LINE_END.match(body, end)
            )
            return (begin - 2, end) if is_clear else (-1, -1)
        at = end
    return -1, -1


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
