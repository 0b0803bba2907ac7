# SPDX-License-Identifier: Apache-2.0
"""Prompts that need no text: sequences of pieces, each an id and a length in tokens.

A piece stands for the first `4 * tokens` bytes of an endless stream of words that depends on its id only (`piece_text`;
four bytes are a token). So pieces say everything that prefix caches and prefix routing can see: two prompts share
exactly as much text as their pieces do, and a shorter piece is the beginning of a longer one with its id.
A real server gets the text; the simulation takes hashes from the pieces directly, which costs nearly nothing.

The two need not be equal, but must be *alike*: two prompts have the same hashes here where they have the same with
`text.block_hashes`. A test holds them together.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import shake_128
from itertools import product
from typing import NamedTuple

from lbproxy.sim.engine.presets import BLOCK_TOKENS

_CONSONANTS = "bdfgklmnprstvwyz"
_WORDS = [f"{''.join(word)} ".encode() for word in product(_CONSONANTS, "aeio", _CONSONANTS)]
"""1,024, so that ten bits choose one."""
_MASK64 = 2**64 - 1


class Piece(NamedTuple):
    """A stretch of text."""

    id: int
    """Equal ids mean equal text, as far as both go. At least 0."""
    tokens: int
    """At least 1."""


def size(pieces: Iterable[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)


def piece_text(piece: Piece) -> bytes:
    """The text of a piece: ASCII, words of three letters, each with a space."""
    choices = shake_128(b"%d" % piece.id).digest(2 * piece.tokens)
    return b"".join(_WORDS[number & 1023] for number in struct.unpack(f"<{piece.tokens}H", choices))


def prompt_text(pieces: Iterable[Piece]) -> bytes:
    """The text of a prompt: four bytes a token."""
    return b"".join(map(piece_text, pieces))


def block_hashes(pieces: Sequence[Piece], adapter: str | None = None) -> list[int]:
    """The chained hash of each full block of 16 tokens. Linear in the blocks; the first piece's are remembered."""
    hashes: list[int] = []
    if not pieces:
        return hashes
    parent = 0 if adapter is None else _adapter_seed(adapter)
    full, rest = divmod(pieces[0].tokens, BLOCK_TOKENS)
    head = _first_piece(parent, pieces[0].id, full)
    hashes.extend(head)
    parent = head[-1] if head else parent
    # What was begun of a block: (id, offset, tokens) of the stretches in it.
    begun: tuple[tuple[int, int, int], ...] = ((pieces[0].id, full * BLOCK_TOKENS, rest),) if rest else ()
    missing = BLOCK_TOKENS - rest
    for identity, tokens in pieces[1:]:
        if tokens < missing:
            begun = (*begun, (identity, 0, tokens))
            missing -= tokens
            continue
        offset = 0
        if begun:
            parent = hash((parent, *begun, (identity, 0, missing)))
            hashes.append(parent)
            offset = missing
        full, rest = divmod(tokens - offset, BLOCK_TOKENS)
        end = offset + full * BLOCK_TOKENS
        for start in range(offset, end, BLOCK_TOKENS):
            # Of integers, so the same in every process.
            parent = hash((parent, identity, start))
            hashes.append(parent)
        begun = ((identity, end, rest),) if rest else ()
        missing = BLOCK_TOKENS - rest
    return hashes


def routing_keys(hashes: Sequence[int], prompt_tokens: int, block_tokens: int) -> tuple[int, ...]:
    """The keys of a prompt's full blocks of `block_tokens` (a multiple of 16), as unsigned 64-bit numbers.

    The hash of a block's last 16 tokens already stands for all that was before, so no other hashing is needed.
    """
    stride = block_tokens // BLOCK_TOKENS
    assert stride * BLOCK_TOKENS == block_tokens
    return tuple(key & _MASK64 for key in hashes[stride - 1 : prompt_tokens // BLOCK_TOKENS : stride])


def _adapter_seed(adapter: str) -> int:
    return struct.unpack("<q", shake_128(adapter.encode()).digest(8))[0]  # type: ignore[no-any-return]


@lru_cache(maxsize=512)
def _first_piece(parent: int, identity: int, full: int) -> list[int]:
    """What most prompts share. Not to be changed by the caller."""
    hashes: list[int] = []
    for start in range(0, full * BLOCK_TOKENS, BLOCK_TOKENS):
        parent = hash((parent, identity, start))
        hashes.append(parent)
    return hashes
