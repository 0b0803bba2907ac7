# SPDX-License-Identifier: Apache-2.0
"""Parts of a prompt that are not text: images, audio, video and files, as a number of tokens and a hash.

An engine computes an image as some hundred or thousand tokens, whatever the size of its base64. The tokens are
estimated here: of a picture from its width and height, which its first bytes state; of anything else from its bytes.
The engine's real count is learned from its `usage` (`core.knowledge.pool_model`).
"""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final

import xxhash

PIXELS_PER_TOKEN: Final = 784
"""Qwen2-VL and its successors: a token for each 28 x 28 pixels (arXiv 2409.12191, section 2.1). LLaVA-NeXT, InternVL
and Gemma 3 are within a factor of two of it for ordinary sizes."""
MIN_IMAGE_TOKENS: Final = 64
MAX_IMAGE_TOKENS: Final = 16_384
"""Qwen2-VL's own bound."""
IMAGE_TOKENS: Final = 1024
"""For an image whose size is not known."""
LOW_DETAIL_TOKENS: Final = 512 * 512 // PIXELS_PER_TOKEN
"""OpenAI's `detail: low` is a picture of at most 512 x 512."""
BYTES_PER_MEDIA_TOKEN: Final = 1000
"""For audio, video and files. Audio at 16 kHz has 32,000 bytes a second, of which engines make 25 to 50 tokens."""
HEAD_CHARS: Final = 64 << 10
"""How much of a picture's base64 is decoded: a JPEG's size follows its thumbnail and camera data."""
FILLER_BYTES: Final = 4
"""Bytes for each media token in the flattened prompt: about as many as a token of text has."""


def filler(payload: str, tokens: int) -> bytes:
    """Return the bytes that stand for media in the flattened prompt: its hash, repeated, as long as `tokens` of text.

    So the blocks of a prompt stay in proportion to what the engine computes, and an image in a conversation is
    recognised again like a long text.
    """
    digest = b"%016x" % xxhash.xxh3_64_intdigest(payload.encode("utf-8", "surrogatepass"))
    return digest * (tokens * FILLER_BYTES // len(digest))


def image_tokens(payload: str, detail: object = None) -> int:
    """Estimate the tokens of an image. `payload`: base64, a data URL, or a URL; `detail`: OpenAI's parameter."""
    size = picture_size(_first_bytes(payload))
    if size is None:
        tokens = IMAGE_TOKENS
    else:
        tokens = min(MAX_IMAGE_TOKENS, max(MIN_IMAGE_TOKENS, size[0] * size[1] // PIXELS_PER_TOKEN))
    return min(tokens, LOW_DETAIL_TOKENS) if detail == "low" else tokens


def blob_tokens(payload: str) -> int:
    """Estimate the tokens of audio, video or a file. `payload`: base64, a data URL or a URL."""
    return min(MAX_IMAGE_TOKENS, max(MIN_IMAGE_TOKENS, len(payload) * 3 // 4 // BYTES_PER_MEDIA_TOKEN))


def _first_bytes(payload: str) -> bytes:
    """Decode the first bytes of base64; empty for other URLs."""
    if payload.startswith("data:"):
        comma = payload.find(",", 0, 256)
        if comma < 0 or ";base64" not in payload[:comma]:
            return b""
        text = payload[comma + 1 : comma + 1 + HEAD_CHARS]
    elif payload.startswith(("http://", "https://")):
        return b""
    else:
        text = payload[:HEAD_CHARS]
    text = text[: len(text) & ~3]
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError):
        return b""


def picture_size(head: bytes) -> tuple[int, int] | None:
    """Width and height in pixels of PNG, JPEG, GIF and WebP; None for other formats, or if `head` is too short."""
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n"):
            size = struct.unpack_from(">II", head, 16)
        elif head.startswith((b"GIF87a", b"GIF89a")):
            size = struct.unpack_from("<HH", head, 6)
        elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
            size = _webp_size(head)
        elif head.startswith(b"\xff\xd8"):
            size = _jpeg_size(head)
        else:
            return None
    except struct.error:
        return None
    return (size[0], size[1]) if size[0] and size[1] else None


def _webp_size(head: bytes) -> tuple[int, int]:
    """Width and height: RFC 9649, sections 2.5 to 2.7."""
    kind = head[12:16]
    if kind == b"VP8X":
        low, high, low_h, high_h = struct.unpack_from("<HBHB", head, 24)
        return (high << 16 | low) + 1, (high_h << 16 | low_h) + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _jpeg_size(head: bytes) -> tuple[int, int]:
    """Height and width from the first frame header (ITU T.81, B.2.2). Raises struct.error if `head` has none."""
    at = 2
    while True:
        mark, kind, length = struct.unpack_from(">BBH", head, at)
        if mark != 0xFF or length < 2:
            return 0, 0
        if 0xC0 <= kind <= 0xCF and kind not in {0xC4, 0xC8, 0xCC}:
            height, width = struct.unpack_from(">HH", head, at + 5)
            return width, height
        at += 2 + length
