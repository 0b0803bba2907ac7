# SPDX-License-Identifier: Apache-2.0
"""Tokens, blocks, the chat template and the answers."""

from hypothesis import given
from hypothesis import strategies as st

from lbproxy.sim.mock.text import (
    BLOCK_BYTES,
    NATURAL_TOKENS,
    answer,
    block_hashes,
    embedding,
    from_token_ids,
    pad,
    render_chat,
    to_token_ids,
    token_count,
)


@given(st.text())
def test_tokens_are_four_bytes_each_and_lose_nothing(text: str) -> None:
    data = text.encode()
    ids = to_token_ids(data)
    assert len(ids) == token_count(len(data)) == -(-len(data) // 4)
    assert from_token_ids(ids) == pad(data)


def test_only_full_blocks_are_hashed_and_equal_hashes_mean_equal_beginnings() -> None:
    one, two = b"a" * BLOCK_BYTES, b"b" * BLOCK_BYTES
    assert len(block_hashes(one + two + b"c" * (BLOCK_BYTES - 1))) == 2
    assert block_hashes(one + two)[0] == block_hashes(one)[0]
    # The same block after another beginning is another block.
    assert block_hashes(two + two)[1] != block_hashes(one + two)[1]


def test_answer_depends_on_prompt_and_key_only() -> None:
    def said(prompt: bytes, key: str) -> bytes:
        return answer(prompt, key, max_tokens=50, natural_end=False, stop=()).text

    assert said(b"p", "k") == said(b"p", "k")
    assert len({said(b"p", "k"), said(b"q", "k"), said(b"p", "l")}) == 3


def test_shorter_answer_is_the_beginning_of_the_longer() -> None:
    short, long = (answer(b"p", "k", max_tokens=n, natural_end=False, stop=()) for n in (7, 70))
    assert (short.tokens, len(short.text), short.finish_reason) == (7, 28, "length")
    assert long.text.startswith(short.text)


def test_natural_end_is_the_end_of_a_sentence() -> None:
    for key in map(str, range(50)):
        said = answer(b"p", key, max_tokens=10_000, natural_end=True, stop=())
        assert said.finish_reason == "stop"
        assert said.text.endswith(b".")
        assert NATURAL_TOKENS.start <= said.tokens <= NATURAL_TOKENS.stop + 32
    assert answer(b"p", "k", max_tokens=5, natural_end=True, stop=()).finish_reason == "length"


def test_stop_string_is_cut_off_but_was_computed() -> None:
    """A stop string in bytes 7 to 12 of the answer: 4 tokens are generated, and 7 bytes are said."""
    whole = answer(b"p", "k", max_tokens=40, natural_end=False, stop=()).text
    word = whole[7:13].decode()
    said = answer(b"p", "k", max_tokens=40, natural_end=False, stop=["\N{SNOWMAN}", word])
    assert (said.text, said.stop_reason, said.finish_reason, said.tokens) == (whole[:7], word, "stop", 4)
    assert said.computed == whole[:16]
    assert [said.token(i) for i in range(4)] == [whole[:4].decode(), whole[4:7].decode(), "", ""]


def test_next_turn_of_a_chat_begins_with_the_blocks_of_the_turn_before() -> None:
    """Whatever the lengths: this is what makes a session worth keeping on one server."""
    for length in range(1, 9):
        first = render_chat([("user", "x" * length)])
        said = answer(first, "k", max_tokens=60 + length, natural_end=False, stop=())
        computed = block_hashes(pad(first) + said.computed)
        second = render_chat([("user", "x" * length), ("assistant", said.text.decode()), ("user", "and now?")])
        assert block_hashes(second)[: len(computed)] == computed


def test_embeddings_are_unit_vectors() -> None:
    vector = embedding(b"text", 64)
    assert len(vector) == 64
    assert abs(sum(x * x for x in vector) - 1) < 1e-9
    assert vector != embedding(b"texts", 64)
