# SPDX-License-Identifier: Apache-2.0
"""Images and audio inside prompts: how many tokens one takes, and the bytes that stand for it in the KV cache.

An image takes width x height / 784 tokens (28 x 28 pixels each, Qwen2.5-VL's patch), within bounds, if its header can
be read: PNG, JPEG or WebP in base64. One given by URL is not fetched and takes a constant. Equal bytes, or equal URLs,
are equal tokens.
"""

from __future__ import annotations

import base64
import binascii
import struct
from hashlib import shake_128

from lbproxy.sim.mock.text import TOKEN_BYTES

PIXELS_PER_TOKEN = 784
IMAGE_TOKENS = range(64, 16_384 + 1)
UNKNOWN_IMAGE_TOKENS = 1024
"""Tokens of an image whose size cannot be read."""
AUDIO_BYTES_PER_TOKEN = 640
"""16-bit samples at 16 kHz, 50 tokens a second: Whisper's encoder."""
MAX_AUDIO_TOKENS = 16_384


def image_at(url: str) -> bytes:
    """What stands for the image of a URL, `data:` or other: whole tokens."""
    data = _data_of(url)
    if data is None:
        return _filler(b"image-url:", url.encode(), UNKNOWN_IMAGE_TOKENS)
    return image(data)


def image_in(encoded: str) -> bytes:
    """What stands for an image in base64."""
    return image_at(f"data:;base64,{encoded}")


def image(data: bytes) -> bytes:
    """What stands for an image."""
    return _filler(b"image:", data, image_tokens(data))


def audio(data: bytes) -> bytes:
    """What stands for a recording."""
    return _filler(b"audio:", data, audio_tokens(len(data)))


def audio_in(encoded: str) -> bytes:
    """What stands for a recording in base64."""
    return audio(_data_of(f"data:;base64,{encoded}") or b"")


def audio_tokens(size_bytes: int) -> int:
    """Tokens of a recording of so many bytes."""
    return min(MAX_AUDIO_TOKENS, 1 + size_bytes // AUDIO_BYTES_PER_TOKEN)


def image_tokens(data: bytes) -> int:
    """Tokens of an image, by its header."""
    size = _png(data) or _webp(data) or _jpeg(data)
    if size is None:
        return UNKNOWN_IMAGE_TOKENS
    return min(IMAGE_TOKENS[-1], max(IMAGE_TOKENS[0], size[0] * size[1] // PIXELS_PER_TOKEN))


def _data_of(url: str) -> bytes | None:
    """The bytes of a `data:` URL in base64; None if it is something else."""
    head, comma, _ = url[:256].partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        return None
    try:
        return base64.b64decode(url[len(head) + 1 :])
    except (binascii.Error, ValueError):
        return None


def _filler(kind: bytes, data: bytes, tokens: int) -> bytes:
    return shake_128(kind + shake_128(data).digest(16)).digest(tokens * TOKEN_BYTES)


def _png(data: bytes) -> tuple[int, int] | None:
    """Width and height: the IHDR chunk comes first (PNG specification, 11.2.2)."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or data[12:16] != b"IHDR" or len(data) < 24:
        return None
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def _webp(data: bytes) -> tuple[int, int] | None:
    """Width and height of the three forms of a WebP file (RFC 9649)."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    if data[12:16] == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if data[12:16] == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack("<HH", data[26:30])
    return width & 0x3FFF, height & 0x3FFF


def _jpeg(data: bytes) -> tuple[int, int] | None:
    """Width and height, from the frame header (ITU T.81, B.2.2): every segment before it is skipped by its length."""
    if not data.startswith(b"\xff\xd8"):
        return None
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
    return None
