# SPDX-License-Identifier: Apache-2.0
"""The model of a multipart form, wherever it stands in it. What parsers could differ about: tests/fuzz/forms.py."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests.forms import (
    MAX_FALSE_DELIMITERS,
    MAX_PART_HEAD_BYTES,
    MAX_PARTS,
    MAX_PREAMBLE_BYTES,
    PART_BYTES,
    STEP_BYTES,
    FormWalk,
    find_form_name,
    read_form_model,
)
from lbproxy.core.requests.outcome import LbError

KIND = b"multipart/form-data; boundary=b0und"


def part(name: str, value: bytes, more: str = "", *, head: str = "Content-Disposition: form-data; ") -> bytes:
    return f"--B0und\r\n{head}name={name}{more}\r\n\r\n".encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--B0und--\r\n"


def renamed(body: bytes, model: str) -> bytes:
    return b"".join(find_form_name(body, KIND).named(body, model))


FILE = part('"file"', b"RIFF" + bytes(range(256)) * 1000, '; filename="a \\"b\\".wav"\r\nContent-Type: audio/wav')
MODEL = part('"model"', b"whisper-1")


@pytest.mark.parametrize(
    "parts",
    [
        (MODEL, FILE),
        (FILE, MODEL),  # OpenAI's own example
        (FILE * 3, part('"prompt"', b"model"), MODEL, part('"n"', b"1")),
        (part("model", b"whisper-1", head="content-disposition:form-data;"),),
        (part('"model"', b" whisper-1\n"),),
        (part('"model"', b"whisper-1", head="CONTENT-DISPOSITION: Form-Data; "),),
        (part('"model"', b"whisper-1", "\r\nContent-Type: text/plain; charset=utf-8"),),
        (part('"file"', b"\r\n--B0un\r\n--B0undx\r\n" + MODEL[9:], '; filename="x"'), MODEL),
    ],
)
def test_it_is_found_and_replaced(parts: tuple[bytes, ...]) -> None:
    body = form(*parts)
    assert read_form_model(body, KIND) == "whisper-1"
    other = renamed(body, "ümlaut")
    assert read_form_model(other, KIND) == "ümlaut"
    assert renamed(other, "x") == renamed(body, "x"), "nothing else is another"


@pytest.mark.parametrize(
    "body",
    [
        form(),
        form(FILE),
        form(part('"MODEL"', b"m")),
        form(part('"model"', b"m", '; filename="m"')),
        form(part('"model"', b"m", '; name="x"')),
        form(part('"mod\\el"', b"m")),
        form(MODEL)[:-8],
        form(MODEL, b"--B0und\nsome take LF for its end\r\n"),
        form(FILE[:-2] + b"\n", MODEL),
        form(FILE[:-2] + b"\r", MODEL),
        form(MODEL, b"--B0und\r\nno colon\r\n\r\nx\r\n"),
        form(MODEL, b"--B0und\r\nContent-Type: text/plain\r\n\r\nx\r\n"),
        b"preamble --B0und\r\n" + form(MODEL),
        b"preamble\n" + form(MODEL),
        b"\n" + form(MODEL),
        b"x" * MAX_PREAMBLE_BYTES + b"\r\n" + form(MODEL),
        form(part('"file"', b"", "\r\nX: " + "y" * MAX_PART_HEAD_BYTES), MODEL),
        form(part('"n"', b"1") * MAX_PARTS, MODEL),
        b"",
        b"--B0und",
    ],
)
def test_what_has_none_or_could_be_read_in_two_ways_has_none(body: bytes) -> None:
    assert read_form_model(body, KIND) is None
    assert renamed(body, "x") == body


@pytest.mark.parametrize("before", [b"\r\n", b"\r\n\r\n", b"This is a form.\r\n", b"--B0un\r\n", b" \r\n"])
def test_what_stands_before_the_first_boundary_is_no_part(before: bytes) -> None:
    """RFC 2046, section 5.1.1; some clients begin with an empty line."""
    body = before + form(FILE, MODEL)
    assert read_form_model(body, KIND) == "whisper-1"
    assert renamed(body, "x") == before + renamed(form(FILE, MODEL), "x")


def test_a_form_of_another_boundary_has_none() -> None:
    for kind in (b"multipart/form-data", b"multipart/form-data; boundary=other", b"multipart/form-data; boundary="):
        assert read_form_model(form(MODEL), kind) is None
    assert read_form_model(form(MODEL), b'multipart/form-data; charset=x; boundary="b0und"') == "whisper-1"


@pytest.mark.parametrize("parts", [(MODEL, FILE, MODEL), (part('"model"', b""),), (part('"model"', b"x" * 257),)])
def test_two_of_them_and_what_is_no_name_are_refused(parts: tuple[bytes, ...]) -> None:
    with pytest.raises(LbError):
        read_form_model(form(*parts), KIND)


@given(st.lists(st.tuples(st.sampled_from(["model", "file", "prompt"]), st.binary(max_size=40)), max_size=6))
def test_it_is_what_was_put_in(parts: list[tuple[str, bytes]]) -> None:
    parts = [(name, b"m" if name == "model" else value.replace(b"--B0und", b"")) for name, value in parts]
    body = form(*(part(f'"{name}"', value) for name, value in parts))
    models = [value for name, value in parts if name == "model"]
    if len(models) > 1:
        with pytest.raises(LbError):
            read_form_model(body, KIND)
    else:
        assert read_form_model(body, KIND) == ("m" if models else None)


@pytest.mark.parametrize(
    "body",
    [
        b"--B0und\r\n" + b"\r\n--B0und" * 400_000,
        b"--B0und\r\ncontent-disposition: form-data" + b"; name=model" * 300_000,
        form(part('"n"', b"1") * 100_000),
        b"--B0und\r\n" + b"Content-Disposition: form-data; name=a\r\n\r\n" * 90_000,
        form(part('"file"', b"\r\n--B0und-" * 400_000), MODEL),
        form(part('"n"', b"1", "".join(f";p{n}=1" for n in range(2000))) * 990),
        form(part('"n"', b"1", "\r\na: b" * 2000) * 990),
        form(part('"n"', b"1", "\r\na: " + " " * 16_000 + "\x01")),
    ],
)
def test_4_mb_of_anything_take_no_longer_than_to_read_them(body: bytes) -> None:
    """Each byte is looked at a fixed number of times: half a second is a hundred times what it takes. 16 KB of blanks
    and a control character took a second, 900 heads with 2,000 parameters each as long.
    """
    began = time.process_time()
    read_form_model(body, KIND)
    assert time.process_time() - began < 0.5


def test_a_head_of_more_parameters_or_lines_than_clients_send_has_no_name() -> None:
    assert read_form_model(form(part('"model"', b"m", "".join(f";p{n}=1" for n in range(31)))), KIND) == "m"
    assert read_form_model(form(part('"model"', b"m", "".join(f";p{n}=1" for n in range(32)))), KIND) is None
    assert read_form_model(form(part('"model"', b"m", "\r\na: b" * 31)), KIND) == "m"
    assert read_form_model(form(part('"model"', b"m", "\r\na: b" * 32)), KIND) is None


def steps_of(body: bytes) -> int:
    walk = FormWalk(body, KIND)
    steps = 1
    while walk.step():
        steps += 1
    assert walk.value is None or body[slice(*walk.value)].strip() == b"whisper-1"
    return steps


def test_a_large_form_is_walked_in_many_steps() -> None:
    size = 20 * STEP_BYTES
    assert steps_of(form(part('"file"', b"x" * size), MODEL)) >= 20
    assert steps_of(form(part('"file"', b"\r\n--B0und-" * (MAX_FALSE_DELIMITERS - 1)), MODEL)) >= 5
    assert steps_of(form(part('"n"', b"1") * (MAX_PARTS - 2), MODEL)) >= 20


@pytest.mark.parametrize("shift", range(-16, 9))
def test_a_delimiter_across_two_steps_is_found(shift: int) -> None:
    """The first step ends in the middle of it, before it, or behind it."""
    filled = STEP_BYTES - PART_BYTES + shift
    body = form(part('"file"', b"x" * filled, '; filename="a"'), MODEL)
    assert read_form_model(body, KIND) == "whisper-1"
    assert read_form_model(body.replace(b"whisper-1", b"whisper-1 \r\n"), KIND) == "whisper-1"


def test_what_is_made_to_be_looked_at_often_has_none() -> None:
    false = b"\r\n--B0und-" * (MAX_FALSE_DELIMITERS + 1)
    assert read_form_model(form(part('"file"', false), MODEL), KIND) is None
    assert read_form_model(form(part('"file"', b"x\r\n--B0und" + b" " * 2000), MODEL), KIND) is None
    with pytest.raises(LbError):
        read_form_model(form(part('"model"', b"m" + b" " * 5000)), KIND)
