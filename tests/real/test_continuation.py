# SPDX-License-Identifier: Apache-2.0
"""Streams of real engines that go on at another server when theirs dies, at every place in a stream.

The model is one that was trained (`words.py`), at temperature 0, one request at a time. Its text goes on as the one
that nobody disturbed, wherever that one is the same with a cold and a warm cache. LBPROXY_DEATHS=190 is the full form;
LBPROXY_STREAM_INTERVAL=5 has vLLM send five tokens in an event.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.real import servers
from tests.real.cutting import Cut
from tests.real.environment import Environment
from tests.real.servers import MODEL, LlmServer, Talking, wait_until

DEATHS = int(os.environ.get("LBPROXY_DEATHS", "12"))
KILLS = max(1, DEATHS // 19)
INTERVAL = os.environ.get("LBPROXY_STREAM_INTERVAL", "1")
SAME = 0.95
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS = 48
SEEN = 12
"""Characters after the place where servers changed: if they are those of another place, some were lost or doubled."""


@dataclass(frozen=True)
class Asked:
    """A request, and how it is called in figures."""

    kind: str
    text: str
    path: str = CHAT
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        said = {"messages": [{"role": "user", "content": self.text}]} if self.path == CHAT else {"prompt": self.text}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, **said, **usage, **self.fields}


FRUITS = "Write five fruits and their colours as a Markdown table."
STEPS = "Explain how to boil an egg in numbered steps, each with two indented bullet points."
ASKED = [
    Asked("English", "Write a short story about a cat."),
    Asked("code", "Write a Python function that sorts a list, with an example."),
    Asked("emoji", "List five fruits, one on each line, with an emoji each."),
    Asked("Chinese", "春眠不觉晓，处处闻啼鸟。夜来风雨声，", COMPLETIONS),  # noqa: RUF001
    Asked("list", STEPS),
    Asked("code", "def fibonacci(n):\n    if n < 2:\n", COMPLETIONS),
    Asked("stop", "Write two paragraphs about the sea.", fields={"stop": ["\n\n", "waves of"]}),
    Asked("list", "Shopping list:\n\n  - milk\n  - bread\n\n      1.  eggs\n", COMPLETIONS),
    Asked("English", "The capital of France is", COMPLETIONS),
    Asked("ends", "Say hello to Anna, and nothing else."),
    Asked("code", "Write a JSON object with the name, age and three hobbies of a person."),
    Asked("Chinese", "中国的首都是北京。日本的首都是东京。法国的首都是", COMPLETIONS),
    Asked("emoji", "🙂🙃🙂🙃🙂🙃 🚀🌍🚀🌍", COMPLETIONS),
    Asked("list", FRUITS),
    Asked("English", "Explain in three sentences why the sky is blue."),
    Asked(
        "accents",
        "Un café crème, s'il vous plaît. Où est la bibliothèque? À côté de l'église, près de la forêt.",
        COMPLETIONS,
    ),
    Asked("code", "Write a small HTML page with a heading and a list of links."),
    Asked("digits", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,", COMPLETIONS),
    Asked("English", "What is the difference between a frog and a toad?"),
    Asked("stop", "Write a Python function that adds two numbers.", fields={"stop": "```\n\nThis"}),
]


@dataclass
class Said:
    """What a stream said."""

    text: str
    reasons: list[str]
    usage: dict[str, Any]
    events: int
    """With the last one, which says that it is done."""
    faults: list[str]
    """What no single stream has."""

    def is_like(self, other: Said) -> bool:
        return (self.text, self.reasons) == (other.text, other.reasons)


def read(path: str, raw: str) -> Said:
    lines = [line[6:] for line in raw.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    errors = [json.dumps(one["error"]) for one in events if "error" in one]
    events = [one for one in events if "error" not in one]
    choices = [one["choices"][0] for one in events if one["choices"]]
    pieces = [one["delta"].get("content") if path == CHAT else one["text"] for one in choices]
    reasons = [one["finish_reason"] for one in choices if one["finish_reason"]]
    seen = {
        "an error": bool(errors),
        "several names": len({(one["id"], one["created"], one["model"]) for one in events}) > 1,
        "not one end": lines.count("[DONE]") != 1 or lines[-1] != "[DONE]",
        "not one reason": len(reasons) != 1,
        "not one role": sum("role" in one.get("delta", {}) for one in choices) != (path == CHAT),
        "no usage": not (events and events[-1].get("usage")),
    }
    faults = [name for name, is_so in seen.items() if is_so] + errors
    usage = (events[-1].get("usage") if events else None) or {}
    return Said("".join(one or "" for one in pieces), reasons, usage, len(lines), faults)


def ask(url: str, asked: Asked, events: int = 0, then: Callable[[str], object] | None = None) -> Said:
    """`then` is called after so many events, with the name of the endpoint."""
    lines = []
    with httpx.stream("POST", url + asked.path, json=asked.body, timeout=120) as response:
        for line in response.iter_lines():
            lines.append(line)
            if then is not None and sum(one.startswith("data: ") for one in lines) == events:
                then(response.headers["x-lbproxy-endpoint"])
                then = None
    assert response.status_code == 200, lines
    return read(asked.path, "\n".join(lines))


@pytest.fixture(scope="module")
def talking(parts: Environment) -> Iterator[Talking]:
    with servers.talking(parts, "--stream-interval", INTERVAL) as found:
        yield found


@dataclass
class Undisturbed:
    asked: Asked
    said: Said


@pytest.fixture(scope="module")
def undisturbed(talking: Talking, found: Callable[[str], None]) -> list[Undisturbed]:
    """The requests whose answer is the same with a cold and a warm cache, at either server."""
    asked = ASKED if len(ASKED) <= DEATHS else ASKED[:DEATHS]
    repeat = []
    for one in asked:
        talking.forget()
        said = [ask(server.url, one) for server in (*talking.vllm, talking.vllm[0])]
        if all(said[0].is_like(other) for other in said):
            repeat.append(Undisturbed(one, said[0]))
    found(f"continuation: {len(repeat)} of {len(asked)} prompts have the same answer with a cold and a warm cache")
    assert len(repeat) > len(asked) / 2
    return repeat


def cuts_of(number: int, one: Undisturbed, rng: random.Random) -> list[Cut]:
    """The places of the deaths of one request. Over all requests: everywhere."""
    events = rng.randrange(1, one.said.events)
    if number % 12 == 7:
        events = one.said.events - 3 + number // 12 % 3  # before the reason, before the usage, before the end
    more = (0, 2, 5, 40, 150, 190, 205)[number % 7]
    in_character = number % 3 == 0 and not one.said.text[len(one.said.text) // 2 :].isascii()
    cuts = [Cut(events, more, in_character, reset=number % 4 != 3)]
    if number % 5 == 4 and one.said.events > 2 * SEEN:  # the second after new text: there is no third server to ask
        cuts = [Cut(max(1, events // 3), more, reset=True), Cut(SEEN, 0, reset=False)]
    return cuts


@dataclass
class Figures:
    """Of many deaths."""

    deaths: int = 0
    streams: int = 0
    same: int = 0
    seams: int = 0
    """Lost or doubled characters."""
    different: Counter[str] = field(default_factory=Counter)
    tokens_off: Counter[int] = field(default_factory=Counter)
    prompts_off: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, one: Undisturbed, said: Said, passed: list[bytes], where: object) -> None:
        """Of a stream, of which so much passed before each of its deaths."""
        self.streams += 1
        self.deaths += len(passed)
        place = f"{one.asked.kind}, {one.asked.text[:30]!r}, {where}"
        self.faults += [f"{fault}: {place}" for fault in said.faults]
        if said.usage and (said.is_like(one.said) or said.reasons == one.said.reasons == ["length"]):
            self.tokens_off[said.usage["completion_tokens"] - one.said.usage["completion_tokens"]] += 1
            self.prompts_off[said.usage["prompt_tokens"] - one.said.usage["prompt_tokens"]] += 1
        if said.is_like(one.said):
            self.same += 1
            return
        self.different[one.asked.kind] += 1
        said_before = passed[0].decode(errors="replace").rpartition("\n\n")[0] if passed else ""
        at = len(read(one.asked.path, said_before).text)
        after, expected = said.text[at : at + SEEN], one.said.text
        shifted = [by for by in range(-SEEN, SEEN + 1) if by and expected[max(0, at + by) :][:SEEN] == after]
        lost = said.text[:at] != expected[:at] or (shifted and after != expected[at : at + SEEN])
        self.seams += bool(lost)
        begin = next((n for n, (a, b) in enumerate(zip(said.text, expected, strict=False)) if a != b), -1)
        self.notes.append(
            f"{'LOST OR DOUBLED ' if lost else ''}{place}: broke at {at}, differs at {begin}: "
            f"{expected[max(0, begin - 20) : begin + 20]!r} became {said.text[max(0, begin - 20) : begin + 20]!r}, "
            f"{one.said.reasons} {said.reasons}"
        )

    def told(self) -> str:
        return (
            f"{self.deaths} deaths in {self.streams} streams, {self.same} ({self.same / self.streams:.1%}) as nobody "
            f"disturbed them, {self.seams} with characters lost or doubled where servers changed, different: "
            f"{dict(self.different)}; tokens off: {dict(self.tokens_off)}, of the prompt {dict(self.prompts_off)}"
        )


@pytest.mark.timeout(3600)
def test_streams_go_on(talking: Talking, undisturbed: list[Undisturbed], found: Callable[[str], None]) -> None:
    """By a relay that resets or closes, at every place of a stream; the other server has a cold cache or a warm one."""
    figures, rng = Figures(), random.Random(55)
    number = 0
    while figures.deaths < DEATHS:
        one = undisturbed[number % len(undisturbed)]
        cuts = cuts_of(number // len(undisturbed) + number, one, rng)
        if number % 2:
            talking.forget()
        talking.scissors.arm(*cuts)
        said = ask(talking.url, one.asked)
        done = talking.scissors.done
        talking.scissors.arm()
        figures.note(one, said, done, cuts)
        number += 1
    for line in figures.notes:
        found(f"continuation: {line}")
    found(f"continuation: by a relay: {figures.told()}")
    assert not figures.faults
    assert not figures.seams
    assert figures.same / figures.streams >= SAME
    assert all(abs(by) <= 1 for by in figures.tokens_off | figures.prompts_off)


@pytest.mark.timeout(3600)
def test_streams_go_on_after_kill_9(
    talking: Talking, undisturbed: list[Undisturbed], found: Callable[[str], None]
) -> None:
    """Of a server itself, whose cache is cold when it is back."""
    figures, rng = Figures(), random.Random(9)
    for number in range(KILLS):
        one = undisturbed[(3 * number) % len(undisturbed)]
        events = rng.randrange(1, max(2, one.said.events - 4))
        killed: list[LlmServer] = []

        def kill(name: str, killed: list[LlmServer] = killed) -> None:
            killed.extend(server for server in talking.vllm if server.name == name)
            killed[0].kill()

        said = ask(talking.url, one.asked, events, kill)
        figures.note(one, said, [b""], f"killed {killed[0].name} after {events}")
        killed[0].start()
        killed[0].wait_until_ready()
        wait_until(lambda: all(health == "up" for health in talking.health()), "both are up")
    for line in figures.notes:
        found(f"continuation: {line}")
    found(f"continuation: by kill -9: {figures.told()}")
    assert not figures.faults
    assert figures.streams - figures.same <= KILLS * (1 - SAME) + 0.5
    assert all(abs(by) <= 1 for by in figures.tokens_off | figures.prompts_off)
