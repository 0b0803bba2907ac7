# SPDX-License-Identifier: Apache-2.0
"""Hashes taken from pieces are alike those taken from the text of the pieces."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests.prompt_keys import hash_prompt
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.mock import text
from lbproxy.sim.workloads.prompts import Piece, block_hashes, piece_text, prompt_text, routing_keys, size

LENGTHS = (1, 3, 8, 15, 16, 17, 32, 40, 100, 256, 300)
pieces = st.builds(Piece, st.integers(1, 4), st.sampled_from(LENGTHS))
prompts = st.lists(pieces, min_size=1, max_size=6).map(tuple)


def test_text_of_a_piece_is_four_ascii_bytes_a_token_and_grows_at_its_end() -> None:
    long = piece_text(Piece(7, 1000))
    assert len(long) == 4000
    assert long.isascii()
    assert all(len(word) == 3 and word.islower() for word in long.decode().split())
    assert long.startswith(piece_text(Piece(7, 10)))
    assert piece_text(Piece(8, 10)) != long[:40]


def alike(left: Sequence[Sequence[object]], right: Sequence[Sequence[object]]) -> bool:
    """Whether there is a one-to-one renaming of the hashes that turns one into the other."""
    there: dict[object, object] = {}
    back: dict[object, object] = {}
    return all(
        len(one) == len(other)
        and all(there.setdefault(a, b) == b and back.setdefault(b, a) == a for a, b in zip(one, other, strict=True))
        for one, other in zip(left, right, strict=True)
    )


@given(st.lists(prompts, min_size=2, max_size=12))
def test_hashes_of_pieces_share_what_hashes_of_the_text_share(several: list[tuple[Piece, ...]]) -> None:
    of_pieces = [block_hashes(prompt) for prompt in several]
    assert [len(found) for found in of_pieces] == [size(prompt) // BLOCK_TOKENS for prompt in several]
    assert alike(of_pieces, [text.block_hashes(prompt_text(prompt)) for prompt in several])


def test_alike_can_fail() -> None:
    assert alike([[1, 2], [1, 3]], [[5, 6], [5, 7]])
    assert not alike([[1, 2], [1, 3]], [[5, 6], [5, 6]])
    assert not alike([[1, 2], [1, 2]], [[5, 6], [5, 7]])


@given(st.lists(prompts, min_size=2, max_size=8), st.sampled_from([64, 256]))
def test_routing_keys_share_what_the_proxys_keys_of_the_text_share(
    several: list[tuple[Piece, ...]], block_tokens: int
) -> None:
    of_pieces = [list(routing_keys(block_hashes(prompt), size(prompt), block_tokens)) for prompt in several]
    of_text = [hash_prompt(prompt_text(prompt), model=None, block_bytes=4 * block_tokens) for prompt in several]
    assert alike(of_pieces, of_text)


def test_routing_keys_are_of_the_prompt_alone() -> None:
    prompt, answer = (Piece(1, 600),), Piece(2, 600)
    keys = routing_keys(block_hashes((*prompt, answer)), 600, 256)
    assert keys == routing_keys(block_hashes(prompt), 600, 256)
    assert len(keys) == 2
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("adapter", ["x", "y"])
def test_adapter_changes_every_hash(adapter: str) -> None:
    prompt = (Piece(1, 64), Piece(2, 40))
    plain, adapted = block_hashes(prompt), block_hashes(prompt, adapter)
    assert len(plain) == len(adapted)
    assert not set(plain) & set(adapted)
    assert adapted == block_hashes(prompt, adapter)


def test_remembered_hashes_are_not_handed_out() -> None:
    """The first piece's are cached: a caller who changes what it got must not change the next caller's."""
    first = block_hashes((Piece(1, 64),))
    first.clear()
    assert len(block_hashes((Piece(1, 64),))) == 4
