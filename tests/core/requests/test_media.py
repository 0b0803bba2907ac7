# SPDX-License-Identifier: Apache-2.0
"""How many tokens a picture is, by the size that its first bytes say."""

from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests.media import (
    IMAGE_TOKENS,
    LOW_DETAIL_TOKENS,
    MAX_IMAGE_TOKENS,
    MIN_IMAGE_TOKENS,
    PIXELS_PER_TOKEN,
    blob_tokens,
    image_tokens,
)

WIDTH, HEIGHT = 1280, 720
EXPECTED = WIDTH * HEIGHT // PIXELS_PER_TOKEN


def _png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(9)


def _jpeg(width: int, height: int, *, before: int = 20_000) -> bytes:
    """With camera data before its frame header, as phones write it."""
    app = struct.pack(">BBH", 0xFF, 0xE1, before + 2) + bytes(before)
    table = struct.pack(">BBH", 0xFF, 0xC4, 6) + bytes(4)
    return b"\xff\xd8" + app + table + struct.pack(">BBHBHH", 0xFF, 0xC2, 17, 8, height, width) + bytes(30)


def _webp(kind: bytes, width: int, height: int) -> bytes:
    head = b"RIFF" + struct.pack("<I", 100) + b"WEBP" + kind + struct.pack("<I", 80)
    if kind == b"VP8X":
        w, h = width - 1, height - 1
        return head + bytes(4) + struct.pack("<HBHB", w & 0xFFFF, w >> 16, h & 0xFFFF, h >> 16) + bytes(40)
    if kind == b"VP8L":
        return head + b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(40)
    return head + bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height) + bytes(40)


PICTURES = {
    "png": _png(WIDTH, HEIGHT),
    "jpeg": _jpeg(WIDTH, HEIGHT),
    "gif": b"GIF89a" + struct.pack("<HH", WIDTH, HEIGHT) + bytes(20),
    "webp": _webp(b"VP8 ", WIDTH, HEIGHT),
    "webp, lossless": _webp(b"VP8L", WIDTH, HEIGHT),
    "webp, extended": _webp(b"VP8X", WIDTH, HEIGHT),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_the_size_of_a_picture_is_read(kind: str) -> None:
    data = base64.b64encode(PICTURES[kind]).decode()
    assert image_tokens(data) == EXPECTED
    assert image_tokens(f"data:image/x;base64,{data}") == EXPECTED


def test_tokens_are_bounded() -> None:
    small, large = (base64.b64encode(_png(*size)).decode() for size in ((8, 8), (60_000, 60_000)))
    assert image_tokens(small) == MIN_IMAGE_TOKENS
    assert image_tokens(large) == MAX_IMAGE_TOKENS
    assert image_tokens(large, "low") == LOW_DETAIL_TOKENS
    assert blob_tokens("A" * 10**8) == MAX_IMAGE_TOKENS


def test_what_has_no_size_counts_as_a_usual_picture() -> None:
    assert image_tokens("https://example.com/cat.png") == IMAGE_TOKENS
    assert image_tokens("data:image/png,notbase64") == IMAGE_TOKENS
    assert image_tokens("file-abc") == IMAGE_TOKENS
    assert image_tokens("") == IMAGE_TOKENS
    cut = base64.b64encode(_jpeg(WIDTH, HEIGHT, before=60_000)).decode()
    assert image_tokens(cut) == IMAGE_TOKENS, "its frame header stands behind what is looked at"


@given(
    kind=st.sampled_from(sorted(PICTURES)), cut=st.integers(0, 80), change=st.binary(max_size=20), at=st.integers(0, 60)
)
def test_no_picture_is_too_strange(kind: str, cut: int, change: bytes, at: int) -> None:
    """Headers come from outside."""
    data = PICTURES[kind]
    data = (data[:at] + change + data[at + len(change) :])[: len(data) - cut]
    assert MIN_IMAGE_TOKENS <= image_tokens(base64.b64encode(data).decode()) <= MAX_IMAGE_TOKENS


@given(payload=st.text(max_size=200), prefix=st.sampled_from(["", "data:", "data:a;base64,", "data:;base64"]))
def test_no_payload_is_too_strange(payload: str, prefix: str) -> None:
    assert MIN_IMAGE_TOKENS <= image_tokens(prefix + payload) <= MAX_IMAGE_TOKENS
    assert blob_tokens(prefix + payload) == MIN_IMAGE_TOKENS
