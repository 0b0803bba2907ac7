# SPDX-License-Identifier: Apache-2.0
"""One stream made of several: what a real vLLM sends when it dies, and where its text ends if it keeps some back."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import orjson
import pytest

from lbproxy.core.responses.continued import held_back
from lbproxy.core.responses.joined import DONE, JoinedStream

HEAD = (
    b'data: {"id":"chatcmpl-ba3aaf76255d9747","object":"chat.completion.chunk","created":1796014996,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":null,"prompt_text":null}\n\n'
)
DYING = (
    b'data: {"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", '
    b'"type": "InternalServerError", "param": null, "code": 500}}\n\n'
)
"""vLLM 0.32.0, when its engine was killed, and at SIGTERM with its default --shutdown-timeout. [DONE] and a last chunk
follow, as after a response that is complete.
"""


def token(text: str, reason: str | None = None) -> bytes:
    """An event of vLLM 0.32.0."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason, "token_ids": None}
    said = {"id": "chatcmpl-ba3aaf76255d9747", "object": "chat.completion.chunk", "created": 1796014996}
    return b"data: " + orjson.dumps(said | {"model": "tiny", "choices": [choice]}) + b"\n\n"


@pytest.mark.parametrize("piece", [1, 100, 100_000])
@pytest.mark.parametrize("last", [DYING, token("", "abort")])
def test_what_a_dying_server_says_is_not_relayed_and_is_no_end(last: bytes, piece: int) -> None:
    """Else the client takes half of a response for a whole one."""
    stream = JoinedStream(chat=True)
    before = HEAD + token("One,") + token(" two")
    raw = before + last + DONE
    passed = b"".join(stream.feed(raw[at : at + piece]) for at in range(0, len(raw), piece))
    assert passed == before
    assert stream.failure is not None
    assert not stream.is_over
    assert stream.finish_reason is None
    assert (stream.move(()), stream.tokens) == ("One, two", 2)


@pytest.mark.parametrize(
    ("said", "kept", "counted", "tokens"),
    [
        (["One", ".", "\n", "\n"], "One.", 3, 2),  # at its end a text's empty line is one token, before a word two
        (["One", ".\n", "\n"], "One.", 3, 1),
        (["One", " two", " three"], "One two three", 3, 3),
        (["One", " two three"], "One two three", 3, 3),
        (["One two", " three.\n\n"], "One two three.", 5, 4),
        (["\n", "\n"], "", 1, 0),
    ],
)
def test_tokens_are_counted_where_several_came_in_one_event(
    said: list[str], kept: str, counted: int, tokens: int
) -> None:
    """By as many as it counts too few the response gets too long."""
    stream = JoinedStream(chat=True)
    stream.feed(HEAD + b"".join(map(token, said)))
    stream.read()
    assert stream.move(()) == kept
    assert stream.counted == "".join(said)
    stream.count(counted)
    assert stream.tokens == tokens


TOKENS = [
    "The",
    " sea",
    " is",
    " vast",
    ",\n",
    "\n",
    "and",
    " my",
    "sterious",
    " 海",
    "",
    "洋",
    " waves",
    " of",
    " blue",
]


@pytest.mark.parametrize("stop", ["x", "no", ["one", "another"], "a text longer than any of the tokens"])
def test_a_server_that_keeps_characters_back_is_continued_from_a_whole_token(stop: object) -> None:
    """An engine that is told "mys" goes on with other words than "terious", as no text has these tokens. What it then
    repeats of the text is dropped. The tokens of which the text does not come yet are not counted, or the response
    would be so much shorter.
    """
    held = held_back({"stop": stop})
    whole = "".join(TOKENS)
    ends = [len("".join(TOKENS[:number])) for number in range(len(TOKENS) + 1)]
    sent = [whole[: max(0, end - held)] for end in ends]
    for many in range(1, len(TOKENS) + 1):
        stream = JoinedStream(chat=True)
        events = b"".join(token(after[len(before) :]) for before, after in pairwise(sent[: many + 1]))
        got = stream.feed(HEAD + events)
        assert got
        stream.read()
        kept = stream.move((), held, exactly=True)
        assert sent[many].startswith(kept)
        if held:
            known = [number for number, end in enumerate(ends) if held < end <= len(sent[many].rstrip())]
            last = ends.index(ends[known[-1]]) if known else 0  # before, nothing is known
            assert kept == whole[: ends[last]].rstrip()
            assert stream.tokens == last - len({end for end in ends[: last + 1] if end > len(kept)})
        rest = stream.feed(token(whole[len(kept) :]))
        said = [orjson.loads(line[6:]) for line in rest.split(b"\n") if line]
        assert sent[many] + "".join(one["choices"][0]["delta"]["content"] for one in said) == whole


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_does_not_depend_on_how_it_is_cut_into_reads(seed: int) -> None:
    """Whether events are known by how they begin and end, alone or several in a read, or are read one by one."""
    rng = random.Random(seed)
    texts = [
        rng.choice(["a", " b", "", '"', "\\", "\n\n", ',"content":"', "海", "\u2028", "}]}", " \t"]) for _ in range(300)
    ]
    events = [token(text) for text in texts]
    for at in rng.sample(range(300), 5):
        events.insert(at, rng.choice([b": keep-alive\n\n", token("x").replace(b"tiny", b"other")]))
    raw = HEAD + b"".join(events)
    cuts = [0, *sorted(rng.sample(range(1, len(raw)), 200)), len(raw)]
    said = [orjson.loads(event[6:])["choices"][0]["delta"]["content"] for event in events if event[0] != ord(":")]
    for pieces in ([raw], [HEAD, *events], [raw[begin:end] for begin, end in pairwise(cuts)]):
        stream = JoinedStream(chat=True)
        assert b"".join(map(stream.feed, pieces)) == raw
        stream.read()
        assert (stream.tokens, stream.text_bytes) == (len(said), len("".join(said).encode()))
        assert stream.obstacle is None
        assert stream.move(()) == "".join(said).rstrip()


def test_the_memory_that_a_text_takes_is_told() -> None:
    """Each token is an object of its own, ten times as large as its characters."""
    stream = JoinedStream(chat=True)
    stream.feed(HEAD)
    events = [token(f"{number:04}") for number in range(5000)]
    tracemalloc.start()
    for one in events:
        stream.feed(one)
    stream.read()
    took, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stream.kept_bytes == pytest.approx(took, rel=0.2)
