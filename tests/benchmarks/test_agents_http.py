# SPDX-License-Identifier: Apache-2.0
"""Coding agents over HTTP: one conversation in three APIs, read back from the bodies; a closed loop against a server.

What it measures is not looked at here: that takes minutes and a quiet machine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import aiohttp
import orjson
import pytest

from benchmarks import agents
from benchmarks.cells import AGENTS
from benchmarks.http_routing.apis import APIS, Json, Prompt, prompt_of, response_id, text_of, tool_list, written
from benchmarks.http_routing.cells import AGENT_APIS, CELLS, Cell
from benchmarks.http_routing.client import Answer, Counters, Reading, Request, counters
from benchmarks.http_routing.results import Source as Arrivals
from benchmarks.http_routing.results import closed_loop, row_of, simulated
from benchmarks.http_routing.sessions import SessionClient
from benchmarks.http_routing.trial import refusal
from benchmarks.page import Page
from lbproxy.sim.figures.report import Summary
from lbproxy.sim.mock.http import MockOptions, MockServer
from lbproxy.sim.workloads.catalogue import make_workload
from lbproxy.sim.workloads.coding_agents import AgentRole
from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import Job
from tests.benchmarks.trials import one_trial
from tests.support.aio import run

NEVER = {"person_share": 0, "delegate": 0}
TINY = Cell(
    "tiny",
    "coding-agents",
    1,
    {"sessions": 3, "duration_s": 3, "warm_up_s": 1.2, "tool_s": 0.05, **NEVER},
    api="chat",
)


def turns(parameters: dict[str, float], count: int = 12) -> list[Job]:
    """The first requests of a session that begins at its begin, each answered after 5 s."""
    workload = make_workload("coding-agents", {"sessions": 1, "duration_s": 90_000, **NEVER, **parameters}, seed=4)
    ((at, job),) = workload.begin(0.0) or ()
    found: list[Job] = []
    while len(found) < count:
        if job.session == "0-2":
            found.append(job)
        ((at, job),) = workload.ended(job, at + 5.0)
    return found


def body(api: str, job: Job, seed: int = 1) -> Json:
    return cast(Json, orjson.loads(orjson.dumps(APIS[api].body(prompt_of(job, written), job, seed))))


# What is said


def said_in_chat(fields: Json) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(role, text, ids of calls) of each step."""
    for message in cast(list[Json], fields["messages"])[1:]:
        calls = tuple(call["id"] for call in cast(list[dict[str, str]], message.get("tool_calls", [])))
        yield str(message["role"]), str(message["content"]), calls or (str(message.get("tool_call_id", "")),)


def said_in_messages(fields: Json) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for message in cast(list[Json], fields["messages"]):
        blocks = cast(list[dict[str, str]], message["content"])
        uses = tuple(block["id"] for block in blocks if block["type"] == "tool_use")
        for block in blocks:
            if block["type"] == "tool_result":
                yield "tool", block["content"], (block["tool_use_id"],)
            elif block["type"] == "text":
                yield str(message["role"]), block["text"], uses or ("",)


def said_in_responses(fields: Json) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    items = cast(list[dict[str, str]], fields["input"])
    for number, item in enumerate(items):
        if item["type"] == "function_call_output":
            yield "tool", item["output"], (item["call_id"],)
        elif item["type"] == "message":
            calls = []
            for later in items[number + 1 :]:
                if later["type"] != "function_call":
                    break
                calls.append(later["call_id"])
            parts = cast(list[dict[str, str]], item["content"])
            yield item["role"], "".join(part["text"] for part in parts), tuple(calls) or ("",)


@pytest.mark.parametrize("parameters", [{}, {"compact_at": 30_000}, {"person_share": 0.5}])
def test_the_three_apis_carry_the_same_conversation(parameters: dict[str, float]) -> None:
    for job in turns(parameters):
        chat, messages, responses = (body(api, job) for api in ("chat", "messages", "responses"))
        steps = list(said_in_chat(chat))
        assert steps == list(said_in_messages(messages)) == list(said_in_responses(responses))
        assert "".join(text for _, text, _ in steps).encode() == "".join(map(written, job.prompt[2:])).encode()
        for (role, _, made), (after, _, answered) in pairwise(steps):
            if after == "tool" and role == "assistant":
                assert answered[0] in made, "a result is that of a call before it"
        assert chat["max_tokens"] == messages["max_tokens"] == responses["max_output_tokens"] == job.answer.tokens


def test_results_of_sub_agents_are_those_of_several_calls_of_one_response() -> None:
    pieces = (Piece(0, 80), Piece(1, 20), Piece(2, 10), *(Piece(100 + n, 8) for n in range(6)))
    job = Job("x-1", pieces, Piece(200, 3), session="s", roles="TSUUARRRA")
    (calls,) = [made for role, _, made in said_in_chat(body("chat", job)) if role == "assistant" and made != ("",)]
    assert len(set(calls)) == 3
    assert [made for role, _, made in said_in_chat(body("chat", job)) if role == "tool"] == [(call,) for call in calls]
    assert list(said_in_chat(body("chat", job))) == list(said_in_messages(body("messages", job)))


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_next_body_goes_on_where_the_one_before_ended(api: str) -> None:
    """A prefix cache, and whoever routes by beginnings, find the bytes of a prompt again at the begin of the next."""
    key = "messages" if api == "chat" else "input"
    for before, after in pairwise(turns({})):
        first, second = body(api, before), body(api, after)
        assert second["tools"] == first["tools"]
        steps = cast(list[Json], first[key])
        assert cast(list[Json], second[key])[: len(steps)] == steps


def test_claude_code_changes_its_billing_header_and_moves_its_marks() -> None:
    first, second = (body("messages", job) for job in turns({}, 2))
    headers = [cast(list[dict[str, str]], fields["system"])[0]["text"] for fields in (first, second)]
    form = r"x-anthropic-billing-header: cc_version=[\w.]+; cc_entrypoint=cli; cch=[0-9a-f]{5};"
    assert all(re.fullmatch(form, header) for header in headers)
    assert headers[0] != headers[1]
    assert cast(list[Json], first["system"])[1:] == cast(list[Json], second["system"])[1:]
    for fields in (first, second):
        messages = cast(list[Json], fields["messages"])
        marked = [n for n, message in enumerate(messages) if b"cache_control" in orjson.dumps(message)]
        assert marked == [len(messages) - 1]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
    assert body("messages", turns({}, 1)[0]) == first, "all of it is the seed's"


def test_tools_are_cut_from_one_text_and_leave_nothing_out() -> None:
    text = written(Piece(0, 1000))
    assert "".join(description for _, description, _ in tool_list(text)) == text


# What is read

STREAMS = {
    "messages": b"""event: message_start
data: {"type":"message_start","message":{"usage":{"input_tokens":14,"output_tokens":0}}}

event: content_block_delta
data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"ied"},"index":0}

event: content_block_delta
data: {"type":"content_block_delta","delta":{"type":"text_delta","text":" Li"},"index":0}

event: message_delta
data: {"type":"message_delta","delta":{},"usage":{"output_tokens":2,"cache_read_input_tokens":16}}

event: message_stop
data: {"type":"message_stop"}

""",
    "responses": b"""event: response.created
data: {"response":{"id":"resp_8985","output":[],"usage":null},"type":"response.created"}

event: response.output_text.delta
data: {"delta":"ied","type":"response.output_text.delta"}

event: response.output_text.delta
data: {"delta":" Li","type":"response.output_text.delta"}

event: response.completed
data: {"response":{"id":"resp_8985","usage":{"input_tokens_details":{"cached_tokens":16},"output_tokens":2}}}

""",
    "chat": b"""data: {"choices":[{"delta":{"content":"ied"}}]}

data: {"choices":[{"delta":{"content":" Li"}}],"usage":{"completion_tokens":2,"d":{"cached_tokens":16}}}

data: [DONE]

""",
}


@pytest.mark.parametrize("api", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_streams_are_read_however_they_are_cut(api: str, size: int) -> None:
    """The events are vLLM 0.32's; text and usage come out alike."""
    stream, reading = STREAMS[api], Reading(APIS[api])
    for start in range(0, len(stream), size):
        reading.feed(stream[start : start + size], 1.0 + start)
    job = Job("1", (Piece(1, 4),), Piece(2, 2))
    assert reading.failure(job) is None
    assert reading.cached_tokens() == 16
    assert len(reading.gaps_s) == (0 if size > len(stream) else 2 if api == "chat" else 1)
    assert text_of(APIS[api], stream) == "ied Li"
    assert response_id(stream) == ("resp_8985" if api == "responses" else None)
    cut = Reading(APIS[api])
    cut.feed(stream[:-40], 1.0)
    assert cut.failure(job) == "cut off"


# The closed loop


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a cell of three seconds."""
    monkeypatch.setitem(CELLS, "tiny", TINY)
    return "tiny"


async def replayed(cell: str) -> tuple[Answer, Counters, SessionClient]:
    async with MockServer(MockOptions(speed=50, max_model_len=131_072)) as server, aiohttp.ClientSession() as http:
        request = Request(cell=cell, seed=1, short=False, trace=None, port=server.port, servers=[server.url])
        client = SessionClient(request, http)
        answer = await client.run()
        async with http.get(f"{server.url}/metrics") as response:
            return answer, counters(await response.read()), client


def test_a_closed_loop_against_a_server_itself(tiny: str) -> None:
    """Each turn follows the one before, its prompt has what the server said, and the figures come out."""
    answer, counted, client = run(replayed(tiny))
    warm, later = answer["phases"]
    calls = [*warm, *later]
    assert [call["failure"] for call in calls] == [None] * len(calls)
    assert len(warm) >= 3
    assert later
    assert counted["finished"] == len(calls)
    assert counted["hit_tokens"] == sum(call["cached_tokens"] for call in calls) > 0
    job, _ = max(client._sent, key=lambda one: len(one[0].prompt))
    texts = [item.text for item in prompt_of(job, client._text).items if item.role == AgentRole.ASSISTANT]
    assert any(text.endswith(". ") or ". " in text for text in texts), "the server's sentences"
    row = row_of(one_trial(tiny, answer, shares=[], seconds=3.0), Arrivals(None, False))
    assert row["summary"]["requests"] == len(later)
    assert row["summary"]["failed"] == 0
    assert row["answered"] == [pytest.approx(len(later), abs=len(warm))]
    assert [len(phase) for phase in closed_loop(answer)] == [len(warm), len(later)]


def test_with_state_only_new_items_are_sent_until_the_conversation_is_another() -> None:
    async def bodies() -> list[Json]:
        async with aiohttp.ClientSession() as http:
            request = Request(cell="agents-responses-id", seed=1, short=True, trace=None, port=1, servers=[])
            client = SessionClient(request, http)
            found = []
            for number, job in enumerate(turns({"compact_at": 30_000}, 20)):
                found.append(cast(Json, orjson.loads(client._body(job))))
                stream = STREAMS["responses"].replace(b"resp_8985", b"resp_%d" % number)
                failure = "status 404" if number == 2 else None
                client._learn(job, {"failure": failure}, stream)  # type: ignore[typeddict-item]
            return found

    sent = run(bodies())
    named = [fields.get("previous_response_id") for fields in sent]
    assert named[:4] == [None, "resp_0", "resp_1", None], "after a failure all of it is sent"
    new = cast(list[dict[str, str]], sent[1]["input"])
    assert [item["type"] for item in new][-1] in {"function_call_output", "message"}
    assert len(new) < len(cast(list[Json], sent[0]["input"]))
    assert any(one is None for one in named[4:]), "a summary stands for no response"


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/chat/completions"])
def test_who_refuses_a_path_is_marked_as_such(path: str) -> None:
    """Measured, not assumed: the router is asked once before the run."""

    async def ask() -> str | None:
        async with MockServer(MockOptions(speed=50)) as server:
            api = replace(APIS["chat"], path=path)
            return await asyncio.to_thread(refusal, api, server.port)

    said = run(ask())
    assert said is None if path == "/v1/chat/completions" else (said or "").startswith("404")


def test_virtual_time_has_the_same_sessions(tiny: str) -> None:
    source = Arrivals(None, False)
    assert simulated(tiny, 1, "adaptive", source) == simulated(tiny, 1, "adaptive", source)


def test_cells_of_agents_are_measured_only_if_named() -> None:
    assert {f"agents-{api}" for api in AGENT_APIS} == {name for name, cell in CELLS.items() if cell.group == "agents"}
    assert all(cell.api in APIS for cell in CELLS.values() if cell.api is not None)


# The page


def test_each_part_of_the_page_keeps_the_other(tmp_path: Path) -> None:
    page = Page(tmp_path / "AGENTS.md", "Over HTTP")
    page.write_virtual("# Coding agents\n\nold\n")
    page.write_over_http("# Over HTTP\n\nmeasured\n")
    page.write_virtual("# Coding agents\n\nnew\n")
    assert page.path.read_text() == "# Coding agents\n\nnew\n\n# Over HTTP\n\nmeasured\n"


def test_the_page_compares_ours_with_the_best_of_each_figure() -> None:
    fast, slow = (Summary(1, *[value] * 15) for value in (1.0, 2.0))  # type: ignore[arg-type]  # failed
    name = next(iter(AGENTS))
    text = agents.page({name: {"adaptive": [slow] * 2, "gie": [fast] * 2, "random": [slow] * 2}}, 2)
    assert f"| {name} | 2.00x (gie) |" in text
    assert text.index("| gie |") < text.index("| adaptive |")
    assert "-50% [-50%, -50%]" in text


def test_a_prompt_needs_the_roles_of_agents() -> None:
    with pytest.raises(AssertionError):
        prompt_of(Job("1", (Piece(1, 4),), Piece(2, 2)), written)
    assert isinstance(prompt_of(turns({}, 1)[0], written), Prompt)
