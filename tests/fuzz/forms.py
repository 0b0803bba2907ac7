# SPDX-License-Identifier: Apache-2.0
"""Multipart forms: the `model` that `core.requests.forms` reads against the one that werkzeug's parser, as servers use
it, sees.

Where we read a model, the server must read the same, as requests are placed by ours. Where we read none it does not
matter what others see in a broken form: the request goes to whoever serves the only model, or is refused.
"""

from __future__ import annotations

import random

from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from lbproxy.core.requests.forms import find_form_name, read_form_model
from lbproxy.core.requests.outcome import LbError
from tests.fuzz.oracle import DifferenceError

NAME = "forms"
KIND = b"multipart/form-data; boundary=--b0undary"
DELIMITER = b"----B0undary"
FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper-1'
PROMPT = b'Content-Disposition: form-data; name="prompt"\r\n\r\nhi'


def form(*parts: bytes) -> bytes:
    return b"".join(DELIMITER + b"\r\n" + part + b"\r\n" for part in parts) + DELIMITER + b"--\r\n"


SEEDS = [
    form(MODEL, FILE + b"RIFF\x00\x01"),
    form(FILE + b"RIFF\r\n--\r\n" + DELIMITER[:-1] + b"x", MODEL),
    form(FILE + b"\r\n" + MODEL, b"content-disposition: form-data; name=model\r\nX: y\r\n\r\nsmall"),
    form(
        b'Content-Disposition: form-data; name="prompt"\r\n\r\nhi',
        MODEL,
        b'Content-Disposition: form-data; name="n"\r\n\r\n1',
    ),
    b"preamble\r\n" + form(MODEL) + b"epilogue",
    form(FILE + DELIMITER + MODEL),
    form(b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"; filename="m"\r\n\r\nm', MODEL),
    form(),
]
TOKENS = [
    *(b"\r\n", b"\r\n\r\n", DELIMITER, DELIMITER + b"\r\n", DELIMITER + b"--", b"--", b"\r\n" + DELIMITER, MODEL, FILE),
    *(b'name="model"', b"name=model", b"; ", b'"', b"model", b"Content-Disposition: form-data", b" ", b"\t", b"\n"),
    *(b'Content-Disposition: form-data; name="x"; y=";name=model;"\r\n\r\n', b"\x00", b"\xff", b"\xc3\xa9", b"\\"),
    b"X: " + b"y" * 20_000 + b"\r\n",
]


def as_werkzeug_reads(data: bytes) -> list[bytes] | None:
    """The values of all fields `model`, files too, in order; None: the form is malformed."""
    decoder = MultipartDecoder(DELIMITER[2:], max_parts=2000)
    decoder.receive_data(data)
    decoder.receive_data(None)
    values: list[bytes] = []
    named = False
    try:
        while not isinstance(event := decoder.next_event(), Epilogue):
            if isinstance(event, Field | File):
                named = event.name == "model"
                if named:
                    values.append(b"")
            elif isinstance(event, Data) and named:
                values[-1] += event.data
            elif isinstance(event, NeedData):
                return None
    except (ValueError, RequestEntityTooLarge):
        return None
    return values


def check(data: bytes, _: random.Random) -> str:
    """See the module."""
    try:
        model = read_form_model(data, KIND)
    except LbError:
        return "refused"
    if model is None:
        return "no model"
    theirs = as_werkzeug_reads(data)
    if theirs is None:
        return "malformed for others"
    if [one.decode("utf-8", "replace").strip() for one in theirs] != [model]:
        raise DifferenceError(f"ours {model!r}, theirs {theirs!r}")
    renamed = b"".join(find_form_name(data, KIND).named(data, "another"))
    if as_werkzeug_reads(renamed) != [b"another"]:
        raise DifferenceError(f"renamed: {as_werkzeug_reads(renamed)!r}")
    return "read alike"
