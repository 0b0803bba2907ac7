# SPDX-License-Identifier: Apache-2.0
"""Images and audio inside prompts: how many tokens one takes, and the bytes that stand for it in the KV cache.

An image takes width x height / 784 tokens (28 x 28 pixels each, Qwen2.5-VL's patch), within bounds, if its header can
be read: PNG, JPEG, GIF or WebP in base64. One given by URL is not fetched and takes a constant. Equal bytes, or equal
URLs, are equal tokens.
"""

from __future__ import annotations

import base64
import binascii
from hashlib import shake_128

from lbproxy.core.requests.media import PIXELS_PER_TOKEN, picture_size
from lbproxy.sim.mock.text import TOKEN_BYTES

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
    size = picture_size(data)
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
