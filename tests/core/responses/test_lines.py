# SPDX-License-Identifier: Apache-2.0
"""A stream of JSON lines shows the same in whatever pieces it comes."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.lines import LineScanner
from lbproxy.core.responses.sse import LINE_BYTES
from lbproxy.core.responses.usage import read_usage

TEXTS = ["four", "ö\n", '"done":true', ""]
LAST = {"done": True, "done_reason": "stop", "prompt_eval_count": 7, "eval_count": 4}
STREAM = b"".join(
    json.dumps(one).encode() + b"\n"
    for one in (*({"message": {"role": "assistant", "content": text}, "done": False} for text in TEXTS), LAST)
)


def scanned(stream: bytes, cuts: list[int]) -> LineScanner:
    scanner = LineScanner()
    edges = [0, *sorted(cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        scanner.feed(b"5\r\n" + stream[start:end] + b"\r\n", 3, 3 + end - start)
    return scanner


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_it_is_read_alike_however_it_is_cut(cuts: list[int]) -> None:
    scanner = scanned(STREAM, cuts)
    assert (scanner.events, scanner.at_boundary, scanner.is_complete) == (5, True, True)
    assert scanner.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert scanner.usage == Usage(7, None, 4)


@given(cut=st.integers(0, len(STREAM) - 1))
def test_the_beginning_of_one_is_not_complete(cut: int) -> None:
    scanner = scanned(STREAM[:cut], [])
    assert not scanner.is_complete
    assert scanner.at_boundary == (not cut or STREAM[cut - 1 : cut] == b"\n")
    assert scanner.usage is None


@pytest.mark.parametrize("line", [b"null", b"[1]", b"{", b'{"message": 1}', b"x" * (LINE_BYTES + 9), b"\xff"])
def test_what_is_no_such_line_shows_nothing(line: bytes) -> None:
    scanner = scanned(line + b"\n" + STREAM, [])
    assert (scanner.events, scanner.usage) == (6, Usage(7, None, 4))


def test_an_error_ends_a_stream() -> None:
    assert scanned(b'{"error":"out of memory"}\n', []).is_complete


def test_the_same_of_a_whole_body() -> None:
    body = json.dumps({"response": '"usage":{}', **LAST}).encode()
    assert read_usage(body, native=True) == Usage(7, None, 4)
    assert read_usage(b'{"embeddings":[[1]],"prompt_eval_count":3}', native=True) == Usage(3, None, None)
    assert read_usage(body) is None
