# SPDX-License-Identifier: Apache-2.0
"""A client cannot make its tokens count less: whatever it writes into the fields that a response repeats, whatever it
accepts, and however its stream ends, at least 95 % of what was generated counts, for flows and for endpoints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.sse import BodyScanner, EventScanner
from lbproxy.core.responses.text_rate import TextRate
from lbproxy.core.responses.usage import read_usage

Json = dict[str, Any]
ENOUGH = 0.95
SIBLINGS = 1000

NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, "input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
FORGED = json.dumps({"usage": NOTHING})
TEXTS = [
    "usage",
    '"usage"',
    '"usage":',
    '"usage":null',
    FORGED,
    FORGED[1:-1],
    f"}}]}},{FORGED[1:]}",
    "\n\ndata: " + FORGED + "\n\n",
    "\ndata: [DONE]\n\n",
    "\\",
    '\\"',
    '\\\\"usage\\\\":{',
    "{" * 40,
    "]}" * 40,
    "us\\u0061ge",
    "é" * 30,
    "\U0001f600usage",
    "\x00\x1f",
    "response.completed",
    "message_stop",
    '"completion_tokens":1',
    "x" * 5000 + "usage",
]
"""What a client writes wherever it may."""


def hostile(rng: random.Random, depth: int = 0) -> Any:
    """A value of a client: text, or an object with usage of its own."""
    kind = rng.randrange(4 if depth < 2 else 1)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return {rng.choice(["usage", "a", *TEXTS]): hostile(rng, depth + 1) for _ in range(rng.randrange(4))}
    if kind == 2:
        return {"usage": dict(NOTHING), "response": {"usage": dict(NOTHING)}, "message": {"usage": dict(NOTHING)}}
    return [hostile(rng, depth + 1) for _ in range(rng.randrange(3))]


def echoes(rng: random.Random, names: list[str]) -> Json:
    """Fields of the response that repeat what the client sent."""
    return {name: hostile(rng) for name in names if rng.random() < 0.7}


def around(rng: random.Random, said: Json, name: str, value: object, names: list[str]) -> Json:
    """An engine's object with `value` under `name`, somewhere between fields that the client chose."""
    before, after = echoes(rng, names[::2]), echoes(rng, names[1::2])
    return {**said, **before, name: value, **after}


def dump(rng: random.Random, said: Json) -> str:
    separators = rng.choice([(",", ":"), (", ", ": "), (" , ", " : ")])
    return json.dumps(said, separators=separators, ensure_ascii=rng.random() < 0.5)


class Said:
    """What a server generates: tokens of text, in events of one or several."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tokens = [
            " " + rng.choice(["usage", "word", "four", "token", "xyz", "long_er"]) for _ in range(self._count())
        ]
        self.prompt = rng.randrange(1, 5000)
        step = rng.choice([1, 1, 2, 4, 50])
        cuts = [*range(0, len(self.tokens), step), len(self.tokens)]
        self.parts = ["".join(self.tokens[a:b]) for a, b in pairwise(cuts)]
        self.upto = cuts[1:]

    def _count(self) -> int:
        return self.rng.choice([20, 100, 400])

    @property
    def counts(self) -> Json:
        return {"prompt_tokens": self.prompt, "completion_tokens": len(self.tokens), "total_tokens": 0}

    @property
    def inputs(self) -> Json:
        return {"input_tokens": self.prompt, "output_tokens": len(self.tokens)}


def chat_events(said: Said, rng: random.Random, *, usage: bool) -> list[str]:
    key = rng.choice(["content", "reasoning_content"])
    logprobs = rng.random() < 0.2
    events = [{"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    for part in said.parts:
        choice: Json = {"index": 0, "delta": {key: part}, "finish_reason": None}
        if logprobs:
            top = {rng.choice(["usage", "a", FORGED]): -1.0}
            choice["logprobs"] = {
                "content": [{"token": "usage", "bytes": [1] * rng.randrange(9)}],
                "top_logprobs": [top],
            }
        event: Json = {"id": "c", "choices": [choice]}
        if rng.random() < 0.1:
            event |= echoes(rng, ["user", "metadata"])
        if rng.random() < 0.5:
            event["usage"] = None
        events.append(event)
    events.append({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    if usage:
        events.append(around(rng, {"id": "c", "choices": []}, "usage", said.counts, ["user", "metadata", "extra"]))
    separators = rng.choice([(",", ":"), (", ", ": ")])
    return [f"data: {json.dumps(one, separators=separators)}\n\n" for one in events] + ["data: [DONE]\n\n"]


def responses_events(said: Said, rng: random.Random, *, usage: bool) -> list[str]:
    def event(kind: str, more: Json) -> str:
        order = {"type": kind, **more} if rng.random() < 0.5 else {**more, "type": kind}
        return f"event: {kind}\ndata: {json.dumps(order)}\n\n"

    names = ["metadata", "user", "instructions", "tools", "text", "prompt"]
    opening = around(rng, {"id": "resp_1"}, "usage", None, names)
    last = around(rng, {"id": "resp_1"}, "usage", said.inputs if usage else None, names)
    deltas = [event("response.output_text.delta", {"delta": part}) for part in said.parts]
    end = rng.choice(["response.completed", "response.incomplete", "response.failed"])
    return [event("response.created", {"response": opening}), *deltas, event(end, {"response": last})]


def messages_events(said: Said, rng: random.Random, *, usage: bool) -> list[str]:
    def event(kind: str, more: Json) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n"

    first = {"input_tokens": said.prompt, "output_tokens": 0} if usage else None
    opening = around(rng, {"id": "msg_1", "role": "assistant"}, "usage", first, ["model", "metadata"])
    deltas = [
        event("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": p}}) for p in said.parts
    ]
    last: Json = {"delta": {"stop_reason": "max_tokens", "stop_sequence": rng.choice(TEXTS)}}
    if usage:
        last["usage"] = {"output_tokens": len(said.tokens)}
    return [
        event("message_start", {"message": opening}),
        *deltas,
        event("message_delta", last),
        event("message_stop", {}),
    ]


def generate_events(said: Said, rng: random.Random, *, usage: bool) -> list[str]:
    events, text = [], ""
    for part, tokens in zip(said.parts, said.upto, strict=True):
        text += part
        reason = {"type": "length"} if tokens == len(said.tokens) else None
        meta = {
            "id": rng.choice(TEXTS),
            "prompt_tokens": said.prompt,
            "completion_tokens": tokens,
            "finish_reason": reason,
        }
        events.append(f"data: {json.dumps({'text': text, 'meta_info': meta})}\n\n")
    return [*events, "data: [DONE]\n\n"]


def completion_events(said: Said, rng: random.Random, *, usage: bool) -> list[str]:
    events = []
    for part, tokens in zip(said.parts, said.upto, strict=True):
        over = tokens == len(said.tokens)
        event: Json = {"content": part, "stop": over, "tokens_predicted": tokens, "tokens_evaluated": said.prompt}
        events.append(
            f"data: {json.dumps(event | (echoes(rng, ['prompt', 'generation_settings']) if over else {}))}\n\n"
        )
    return events


STREAMS: dict[str, Callable[..., list[str]]] = {
    "chat": chat_events,
    "responses": responses_events,
    "messages": messages_events,
    "generate": generate_events,
    "completion": completion_events,
}
NATIVE = {"generate", "completion"}


def whole_body(said: Said, rng: random.Random, api: str) -> str:
    text = "".join(said.parts)
    names = ["user", "metadata", "instructions", "tools", "id", "object"]
    match api:
        case "chat":
            choice = {"index": 0, "message": {"role": "assistant", "content": text, "tool_calls": hostile(rng)}}
            return dump(rng, around(rng, {"choices": [choice]}, "usage", said.counts, names))
        case "generate":
            meta = {"id": rng.choice(TEXTS), **said.counts}
            return dump(rng, {"text": text, "meta_info": meta, **echoes(rng, ["user"])})
        case "completion":
            return dump(rng, {"content": text, "tokens_predicted": len(said.tokens), "tokens_evaluated": said.prompt})
        case _:
            return dump(rng, around(rng, {"output": [{"text": text}]}, "usage", said.inputs, names))


def in_pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """As an endpoint's reads may cut it: into events, at random, or not."""
    how = rng.randrange(4)
    if how == 0:
        return [part + b"\n\n" for part in data.split(b"\n\n")[:-1]] if data.endswith(b"\n\n") else [data]
    size = [len(data), 1 + len(data) // 7, rng.randrange(1, 3000)][how - 1]
    return [data[at : at + size] for at in range(0, len(data), size)]


def counted(usage: Usage | None, estimate: int) -> int:
    """Tokens of the response, as the exchange counts them."""
    return estimate if usage is None or usage.completion_tokens is None else usage.completion_tokens


def scanned(parts: list[bytes], api: str) -> tuple[Usage | None, int]:
    skips = api in {"responses", "messages"}
    scanner = EventScanner(skip_preamble=skips, measures=True, native=api in NATIVE)
    for part in parts:
        data = b"xx" + part + b"xx"
        if not scanner.is_token(data, 2, len(data) - 2):
            scanner.feed(data, 2, len(data) - 2)
    return scanner.usage, TextRate().tokens(scanner.token_events, scanner.text_bytes)


def test_a_thousand_streams_and_bodies_count_what_was_generated() -> None:
    """Text in any field, encodings of it, pieces of any size, streams that break."""
    worst, exact = 2.0, 0
    for number in range(SIBLINGS):
        rng = random.Random(number)
        said, api = Said(rng), rng.choice(list(STREAMS))
        if rng.random() < 0.3:
            body = whole_body(said, rng, api).encode("utf-8", "surrogatepass")
            usage = read_usage(body, native=api in NATIVE)
            scanner = BodyScanner(native=api in NATIVE)
            for part in in_pieces(body, rng):
                scanner.feed(part, 0, len(part))
            assert usage == scanner.usage, number
            assert usage is not None, number
            assert usage[::2][:2] == (said.prompt, len(said.tokens)), number
            exact += 1
            continue
        reports = rng.random() < 0.5
        events = STREAMS[api](said, rng, usage=reports)
        kept = len(events) if rng.random() < 0.6 else rng.randrange(1, len(events) + 1)
        generated = generated_by(said, kept if kept == len(events) else kept - 1, api)
        text = "".join(events[:kept]).encode()
        cut = text if kept == len(events) else text[: max(1, len(text) - rng.randrange(1, 20))]
        usage, estimate = scanned(in_pieces(cut, rng), api)
        if reports and kept == len(events):
            assert usage is not None, number
            assert (usage.prompt_tokens, usage.completion_tokens) == (said.prompt, len(said.tokens)), number
            exact += 1
        if api in NATIVE or kept == len(events) or usage is None:
            found = counted(usage, estimate)
        else:
            found = max(counted(usage, estimate), estimate)
        share = found / generated if generated >= 20 else 1.0
        worst = min(worst, share)
        assert share >= ENOUGH, (number, api, found, generated, kept, len(events))
    assert worst < 2.0
    assert exact > SIBLINGS // 3


def generated_by(said: Said, events: int, api: str) -> int:
    """How many tokens so many complete events have."""
    done = events - (0 if api in NATIVE else 1)
    return said.upto[min(done, len(said.upto)) - 1] if done > 0 else 0


@pytest.mark.parametrize("more", ['"role":"assistant",', '"logprobs":null,'])
def test_what_one_event_has_more_than_others_is_not_taken_from_their_text(more: str) -> None:
    """Of events with several tokens each, which are not all parsed: all but that one were counted short by it."""
    text = '"content":"%s"' % (" four" * 5)
    parts = [f'data: {{"choices":[{{"delta":{{{before}{text}}}}}]}}\n\n'.encode() for before in [more] + [""] * 99]
    assert scanned(parts, "chat") == (None, 100 * 25 // 4)
