# SPDX-License-Identifier: Apache-2.0
"""`lbproxy status`, `top`, `drain` and `explain`, against answers of the admin API and against a running lbproxy."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from lbproxy.commands import operate
from lbproxy.commands.cli import _parser, main
from lbproxy.commands.client import AdminClient, AdminError
from lbproxy.commands.operate import picture
from lbproxy.commands.tables import decisions, explanation, fleet, offer, replicas, summary, transitions
from lbproxy.config import addresses
from tests.support.process import LBPROXY, changing, lbproxy, mock


def endpoint(name: str, **more: object) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "health": "up",
        "models": ["m"],
        "draining": False,
        "leaving": False,
        "backing_off": False,
        "readmitted": False,
        "share": 1.0,
        "in_flight": 3,
        "waiting": 0.0,
        "running": 3.0,
        "kv_utilization": 0.42,
        "learned": {"prefill_ms_per_token": 0.1, "wait_ms": 12.0, "limit": 64.0, "full_by": None, "held": 0},
        "recent": {"first_byte_ms": 120.4, "hit_ratio": 0.31},
    }
    return found | more


def state(endpoints: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    found: dict[str, Any] = {
        "version": "0.2.0",
        "policy": "adaptive",
        "uptime_s": 3725.0,
        "stopping": False,
        "running": 9,
        "settings": {"accepted": True, "at": "2026-11-22T00:00:00.000Z"},
        "endpoints": endpoints,
        "queue": {"waiting": 0, "oldest_s": None},
        "transitions": [
            {
                "at": "2026-11-22T00:36:59.000Z",
                "endpoint": "gpu-3",
                "from": "up",
                "to": "down",
                "reason": "refused " * 40,
            }
        ]
        * 5,
        "decisions": [
            {
                "id": f"id-{n}",
                "stream": True,
                "endpoint": "gpu-1",
                "outcome": "completed",
                "status": 200,
                "queue_ms": 0.0,
                "duration_ms": 812.0,
                "observed": {"first_byte_ms": 33.0},
            }
            for n in range(20)
        ],
        "history": [
            {"seconds": 5.0, "requests": 20, "errors": 1, "rejected": 0, "first_byte_ms": {"p50": 80, "p95": None}}
        ],
    }
    return found | more


def drawn(shown: Any, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("count", [1, 3, 12, 100, 1000])
def test_top_fits_a_terminal_of_80_by_24(count: int) -> None:
    lines = drawn(picture(state([endpoint(f"gpu-{n}") for n in range(count)]), height=24))
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    shown = sum(re.match(r"gpu-\d+ +up ", line) is not None for line in lines)
    assert shown >= min(count, 5)
    if shown < count:
        assert any(f"and {count - shown} more" in line for line in lines)


def exchange(*others: dict[str, Any], problem: str | None = None) -> dict[str, Any]:
    return {
        "name": "lb-1",
        "url": "redis://redis:6379/0",
        "connected": problem is None,
        "problem": problem,
        "others": [*others],
    }


def replica(name: str, **more: object) -> dict[str, Any]:
    found: dict[str, Any] = {"id": f"{name}-1", "name": name, "version": "0.2.0", "in_flight": 4, "batch_age_s": 0.31}
    return found | {"complete": True, "resets": 1, "missed": 0} | more


def test_each_replica_has_a_line() -> None:
    assert replicas(state([], replicas=None)) is None
    new = replica("lb-3", in_flight=None, batch_age_s=None, complete=False)
    shown = state([endpoint("gpu-1", elsewhere=7)], replicas=exchange(replica("lb-2"), new, replica("", missed=2)))
    assert drawn(replicas(shown)) == [
        "this is replica lb-1, redis://redis:6379/0",
        "replica lb-2  0.2.0  4 in flight  last batch 0.3 s ago",
        "replica lb-3  0.2.0  nothing received yet",
        "replica -1  0.2.0  4 in flight  last batch 0.3 s ago  2 gaps",
    ]
    lines = drawn(picture(shown, height=24))
    assert lines[0].endswith("1 of 1 endpoints up  3 other replicas")
    assert max(map(len, lines)) <= 80
    assert any(re.match(r"gpu-1 +up +3\+7 ", line) for line in lines)


def test_a_replica_that_goes_on_alone_says_why() -> None:
    shown = state([endpoint("gpu-1")], replicas=exchange(problem="Connection \x1b[2Jrefused"))
    assert drawn(replicas(shown), width=200)[1].endswith("goes on alone: Connection [2Jrefused")
    assert drawn(summary(shown))[0].endswith("  alone")


def test_of_too_many_those_that_need_a_look_come_first() -> None:
    endpoints = [endpoint(f"gpu-{n}") for n in range(50)]
    endpoints[30] = endpoint("sick", health="ejected")
    endpoints[40] = endpoint("leaves", draining=True, in_flight=2)
    endpoints[20] = endpoint("busy", in_flight=99)
    lines = drawn(fleet(endpoints, limit=5))
    assert [line.split()[0] for line in lines] == ["endpoint", "sick", "leaves", "busy", "gpu-0", "and"]
    assert "draining" in lines[2]
    assert "and 46 more" in lines[-1]


def test_what_is_unknown_is_a_dash_and_never_0() -> None:
    unknown = endpoint("new", waiting=None, running=None, kv_utilization=None, learned=None, recent=None, in_flight=0)
    assert drawn(fleet([unknown]))[1].split() == ["new", "up", "0", *"-----------"]


def test_requests_that_wait_are_not_said_to_run() -> None:
    busy = state([endpoint("a")], running=52, queue={"waiting": 50, "oldest_s": 1.0})
    assert "2 running, 50 waiting, the oldest for 1.0 s" in drawn(summary(busy))[1]


def test_off_is_marked_where_a_server_is_slower_than_predicted() -> None:
    table = fleet([endpoint("a", recent={"first_byte_off": off, "hit_ratio": None}) for off in (0.4, 1.9, 2.1)])
    cells = [*next(one for one in table.columns if one.header == "off").cells]
    assert [(str(one), one.style) for one in cells] == [("0.4x", ""), ("1.9x", ""), ("2.1x", "yellow")]  # type: ignore[union-attr]


def test_nothing_from_outside_moves_the_cursor() -> None:
    """A client chooses its request id's neighbours: the model, the path. A server words its errors."""
    evil = "\x1b[2Jx\r\n\x07"
    spoilt = state([endpoint(evil, health="down", models=[evil])], version=evil, policy=evil, listen=evil)
    lines = drawn(picture(spoilt, height=24)) + drawn(offer(spoilt))
    found = {"endpoint": evil, "parts": {}, "chosen": True, "cost": 1.0}
    decision = {
        "endpoint": evil,
        "policy": "p",
        "because": evil,
        "candidates": 1,
        "shown": [found],
        "left_out": [{"endpoint": evil, "why": evil}],
    }
    request: dict[str, Any] = {
        **dict.fromkeys(("id", "at", "method", "path", "model", "alias", "flow", "endpoint", "outcome", "error"), evil),
        "fallback_from": evil,
        "status": 200,
        "attempts": 2,
        "running": False,
        "stream": True,
        "duration_ms": 1.0,
        "queue_ms": 5.0,
        "waited": {"because": "held", "meaning": evil, "endpoint": evil, "full_by": "space"},
        "failed": [{"endpoint": evil, "failure": evil}],
        "decisions": [decision],
        "predicted": {"first_byte_ms": None, "cached_tokens": None},
        "observed": {"first_byte_ms": None, "cached_tokens": None, "prompt_tokens": None},
    }
    text = "\n".join([*lines, *drawn(explanation(request))])
    assert "costs in" not in text, "they have no unit"
    guessed = request | {"decisions": [decision | {"shown": [found | {"parts": {"base": 40.0}}], "assumed": ["base"]}]}
    assert "assumed" in "\n".join(drawn(explanation(guessed)))
    lines = drawn(explanation(request | {"decisions": [], "left_out": [{"endpoint": "gpu-1", "why": "half_open"}]}))
    assert "not asked: gpu-1 (half open)" in lines
    observed = {"first_byte_ms": 45.0, "cached_tokens": None, "prompt_tokens": None}
    for stream, seen in ((True, "45.0"), (False, "-")):  # the first byte of what is no stream is its end
        told = explanation(request | {"stream": stream, "observed": observed})
        assert any(line.split() == ["first", "byte,", "ms", "-", seen] for line in drawn(told))
    assert any(line.startswith("costs in ms cost") for line in drawn(explanation(request | in_ms(decision))))
    assert text.count("asked for as") == text.count("  flow ") == 1
    assert " in place of [2Jx" in text
    assert "asked for" not in "\n".join(drawn(explanation(request | {"alias": None, "flow": "anonymous"})))
    assert "It waited 5.0 ms, first for [2Jx: [2Jx." in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[2Jx" in text


def test_what_is_only_assumed_is_a_dash_until_it_was_learned() -> None:
    speeds = {"prefill_ms_per_token": 0.1, "wait_ms": 12.0, "gap_ms": 15.0}
    ends = [
        drawn(fleet([endpoint("a", learned=speeds | {"samples": samples})]))[1].split()[-3:]
        for samples in (
            {"prefill_ms_per_token": 0, "gap_ms": 0},
            {"prefill_ms_per_token": 0, "gap_ms": 3},
            {"prefill_ms_per_token": 1, "gap_ms": 3},
        )
    ]
    assert ends == [["12", "-", "-"], ["12", "-", "15"], ["12", "100", "15"]]


def test_how_much_more_an_endpoint_takes_and_why_no_more() -> None:
    room = {"wait_ms": 1250.0, "limit": 63.7, "full_by": None, "held": 0}
    rooms = [room, room | {"full_by": "space", "held": 5}, room | {"limit": None}]
    rows = drawn(fleet([endpoint("a", learned=one) for one in rooms]))
    assert [" ".join(row.split()[2:-9]) for row in rows[1:]] == ["3 of 64 0", "3 space 5", "3 - 0"]
    assert [row.split()[-3] for row in rows[1:]] == ["1,250"] * 3


def test_status_says_from_the_first_second_where_it_is_and_what_it_serves() -> None:
    found = state(
        [
            endpoint("a", models=["llama", "sql"]),
            endpoint("b", models=None, health="starting"),
            endpoint("c", models=[]),
        ],
        listen="http://127.0.0.1:8080",
        history=[],
    )
    assert drawn(offer(found)) == ["http://127.0.0.1:8080 serves llama, sql"]
    found["endpoints"] = [endpoint(f"gpu-{n}", models=[f"m{n}"], health="down") for n in range(9)]
    found["endpoints"][1]["reason"] = "refused"
    assert drawn(offer(found)) == [
        "http://127.0.0.1:8080 serves m0, m1, m2, m3, m4, m5 and 3 more",
        "gpu-0 is down",
        "gpu-1 is down: refused",
        "gpu-2 is down",
        "and 6 more",
    ]
    assert "not ready" in " ".join(drawn(summary(found)))
    drained = {"at": "", "endpoint": "gpu-1", "from": "down", "to": "draining", "reason": "an operator drained it"}
    found["transitions"] = [drained, *found["transitions"]]
    assert "gpu-1 is down: refused" in drawn(offer(found)), "a drain is not why"
    memory = [{"model": "m\x1b", "state": "loaded", "for_s": 200.0}, {"model": "n", "state": "loading", "for_s": 4.0}]
    found["endpoints"] = [endpoint("desk", models=["m"], in_memory=memory), endpoint("den", models=[], in_memory=[])]
    assert drawn(offer(found))[1:] == [
        "desk has in memory: m (loaded for 3 min), n (loading for 4 s)",
        "den has in memory: no model",
    ]
    found["endpoints"] = [endpoint("b", models=None, health="starting")]
    assert drawn(offer(found)) == ["http://127.0.0.1:8080 no models known yet"]
    assert "0 of 1 endpoints up  starting" in " ".join(drawn(summary(found)))


def test_status_says_what_the_load_of_a_model_needs_only_if_that_is_known() -> None:
    """A recommendation of as many as there are, or were, is no need; and an idle model has none."""
    model = {"model": "m\x1b", "endpoints": 3, "recommended": 1, "recommended_known": True, "waiting": 0}
    models = [
        model,
        model | {"endpoints": 1, "recommended": 4},
        model | {"endpoints": 0, "recommended": 2},
        model | {"recommended_known": False},
        model | {"recommended": 3},
        model | {"recommended": 0},
        model | {"recommended": None, "recommended_known": False},
    ]
    assert drawn(offer(state([endpoint("a")], models=models)))[1:] == [
        "model m: its load needs 1 endpoint; 3 can serve it",
        "model m: its load needs 4 endpoints; 1 can serve it",
        "model m: its load needs 2 endpoints; none can serve it",
    ]


def in_ms(decision: dict[str, Any]) -> dict[str, Any]:
    return {"decisions": [decision | {"unit": "ms"}]}


def test_the_summary_says_what_is_wrong() -> None:
    refused = {"accepted": False, "at": ""}
    queue = {"waiting": 7, "oldest_s": 3.25}
    found = state([endpoint("a"), endpoint("b", health="down")], settings=refused, stopping=True, queue=queue)
    text = " ".join(drawn(summary(found)))
    assert "1 of 2 endpoints up" in text
    assert "stopping" in text
    assert "settings refused" in text
    assert "7 waiting, the oldest for 3.2 s" in text
    assert "4.0 requests/s" in text
    assert "first byte 80 / - ms" in text
    found["history"][0]["first_byte_ms"] = {"p50": None, "p95": None}
    assert "0 rejected  no streams" in " ".join(drawn(summary(found), width=200))


def test_the_first_byte_of_a_response_that_is_no_stream_is_not_shown() -> None:
    """It is the end: beside the first bytes of streams it would look slow."""
    recent = [one | {"stream": stream} for one, stream in zip(state([])["decisions"], (True, False), strict=False)]
    assert [line.split()[-2] for line in drawn(decisions(recent))[1:]] == ["33", "-"]


def test_drains_are_among_the_transitions() -> None:
    drained = {"at": "2026-11-22T00:36:59.000Z", "endpoint": "a", "from": "up", "to": "draining", "reason": "why"}
    assert drawn(transitions([drained])) == ["00:36:59 a is draining: why"]


# --- The API ----------------------------------------------------------------------------------------------------------


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> AdminClient:
    client = AdminClient("http://lb:1", "secret")
    client._client = httpx.Client(
        base_url="http://lb:1", transport=httpx.MockTransport(answer), headers=client._client.headers
    )
    return client


def test_a_drain_waits_for_the_last_request_or_for_the_time() -> None:
    left: list[int | None] = [4, 4, 2, None, 0]  # None: a worker process has not said what runs there
    fleet_of = [endpoint("pool/a"), endpoint("pool/b")]
    drain = partial(operate.drain, force=False)

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        if request.url.raw_path == b"/admin/endpoints":
            return httpx.Response(200, json={"endpoints": fleet_of})
        assert request.url.raw_path.startswith(b"/admin/endpoints/pool%2Fa")
        count = left.pop(0)
        return httpx.Response(200, json={"in_flight": count or 0, "drained": count == 0})

    console = Console(file=io.StringIO(), width=80)
    assert drain(answering(answer), console, "pool/a", wait_s=inf) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines() == [
        "pool/a is draining: 4 requests left",
        "pool/a is draining: 2 requests left",
        "pool/a is draining: not all worker processes have said yet what runs there",
        "pool/a is drained",
    ]
    left[:] = [1]
    assert drain(answering(answer), console, "pool/a", wait_s=None) == 0
    left[:] = [1]
    assert drain(answering(answer), console, "pool/a", wait_s=0.0) == 1
    assert "pool/a still has 1 request after 0 s; it stays drained" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_last_endpoint_of_a_model_is_drained_by_force_only() -> None:
    asked: list[tuple[str, bytes]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.raw_path))
        last = {"endpoints": [endpoint("a"), endpoint("b", draining=True)]}
        return httpx.Response(200, json=last if request.method == "GET" else {"in_flight": 0})

    console = Console(file=io.StringIO(), width=120)
    drain = partial(operate.drain, answering(answer), console, "a", wait_s=None)
    assert drain(force=False) == 1
    assert asked == [("GET", b"/admin/endpoints")]
    assert drain(force=True) == 0
    assert asked[1:] == [("GET", b"/admin/endpoints"), ("POST", b"/admin/endpoints/a/drain")]
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "a is not drained: no other endpoint takes requests for m (--force drains it anyway)",
        "no endpoint takes requests for m now: they get 503 until one does",
        "a is drained",
    ]


@pytest.mark.parametrize(
    ("others", "alone"),
    [
        ([], ["m", "n"]),
        ([endpoint("b", models=["n"])], ["m"]),
        ([endpoint("b", models=["n"], draining=True)], ["m", "n"]),
        ([endpoint("b", models=["n"], leaving=True)], ["m", "n"]),
        ([endpoint("b", models=["n"], health="down")], ["m", "n"]),
        ([endpoint("b", models=["n"], health="half_open")], ["m"]),
        ([endpoint("b", models=["n"], health="ejected", readmitted=True)], ["m"]),
        ([endpoint("b", models=["n"], health="down", sleep={"state": "asleep"})], ["m"]),
        ([endpoint("b", models=["n"], health="down", sleep={"state": "unknown"})], ["m", "n"]),
        ([endpoint("b", models=None)], []),
        ([endpoint("b", models=None, health="down")], ["m", "n"]),
    ],
)
def test_which_models_only_the_endpoint_to_be_drained_takes(others: list[dict[str, Any]], alone: list[str]) -> None:
    fleet_of = [endpoint("a", models=["m", "n"]), *others]
    assert operate.only_there(fleet_of, "a") == alone
    ranks = [endpoint("a#0", models=["m", "n"]), endpoint("a#1", models=["m", "n"]), *others]
    assert operate.only_there(ranks, "a") == alone, "a server, by all of its ranks"
    assert operate.only_there(ranks, "a#0") == [], "the other rank takes them"
    down = [endpoint("a", models=["m", "n"], health="down"), *others]
    assert operate.only_there(down, "a") == [], "it takes none itself"


def test_without_an_id_the_last_request_is_explained() -> None:
    found = {"decisions": [{"engine_id": "the/last"}, {"engine_id": "before"}]}
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path.decode())
        return httpx.Response(200, json=found)

    console = Console(file=io.StringIO(), width=80)
    assert operate.explain(answering(answer), console, None, as_json=True) == 0
    assert asked == ["/admin/decisions", "/admin/decisions/the%2Flast"]
    found["decisions"] = []
    with pytest.raises(AdminError, match="no request has ended yet"):
        operate.explain(answering(answer), console, None, as_json=True)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"changed": [], "at_next_start": []}, "the settings are reloaded: nothing changed\n"),
        (
            {"changed": ["a: [1], was 2"], "at_next_start": ["listen", "workers"]},
            "the settings are reloaded:\n  a: [1], was 2\nonly a restart changes listen, workers\n",
        ),
    ],
)
def test_a_reload_says_what_changed(result: dict[str, object], said: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"token_file": None})
        assert request.url.path == "/admin/reload"
        return httpx.Response(200, json={"reloaded": True, "endpoints": 1} | result)

    console = Console(file=io.StringIO(), width=80)
    assert operate.reload(answering(answer), console) == 0
    assert console.file.getvalue() == said  # type: ignore[attr-defined]


def test_completion_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/admin/endpoints":
            return httpx.Response(200, json={"endpoints": [{"name": "gpu-1"}, {"name": "gpu-2"}]})
        return httpx.Response(200, json={"decisions": [{"engine_id": "7a"}]})

    assert operate.names(answering(answer), of_requests=False) == 0
    assert operate.names(answering(answer), of_requests=True) == 0
    assert capsys.readouterr().out == "gpu-1\ngpu-2\n7a\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(401, json={"error": {"message": "This needs a token."}}), "LBPROXY_ADMIN_TOKEN"),
        (httpx.Response(422, json={"error": {"message": "No.", "problems": ["a: b", "c: d"]}}), "No.\n  a: b\n  c: d"),
        (
            httpx.Response(404, json={"error": {"message": "There are: a.", "code": "unknown_endpoint"}}),
            "There are: a. `lbproxy status` lists them.",
        ),
        (httpx.Response(200, text="<html>"), "is not lbproxy"),
        (httpx.Response(200, json=[1]), "is not lbproxy"),
        (httpx.Response(500, json={}), "returned 500"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(answer: httpx.Response, said: str) -> None:
    with pytest.raises(AdminError, match=re.escape(said)):
        answering(lambda _: answer).get("state")


@pytest.mark.parametrize(
    "command", [["status"], ["top"], ["drain", "x"], ["reload"], ["explain", "x"], ["completion", "endpoints"]]
)
def test_nobody_there_is_an_exit_with_1(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--admin", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert main([*command, "--admin", "127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--admin", "127.0.0.1"])
    assert "expected HOST:PORT or http://HOST:PORT" in capsys.readouterr().err


def test_the_environment_says_where_the_admin_listener_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LBPROXY_ADMIN", "127.0.0.1:9")
    assert main(["status"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert main(["status", "--admin", "127.0.0.1:7"]) == 1
    assert "http://127.0.0.1:7 cannot be reached" in capsys.readouterr().err
    monkeypatch.setenv("LBPROXY_ADMIN", "no address")
    with pytest.raises(SystemExit):
        main(["status"])


@pytest.mark.parametrize("text", ["127.0.0.1:1", "[::1]:1", "gpu-1.example:80", "localhost:0"])
def test_an_address_and_its_url_are_the_same_to_every_command(text: str) -> None:
    for form in (text, f"http://{text}", f"HTTP://{text}/"):
        assert addresses.listener(form) == text
        assert addresses.url(form).lower().rstrip("/") == f"http://{text}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1",
        ":1",
        "a:b",
        "a:99999",
        "a:1 b",
        "http://",
        "ftp://a:1",
        "http://u:p@a:1",
        "a:1/x",
        "a:1?q",
        "a:1\n",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    for read in (addresses.listener, addresses.url):
        with pytest.raises(ArgumentTypeError, match=f"expected {addresses.FORMS}, such as "):
            read(text)


def test_a_url_may_lead_through_something_else_and_a_listener_may_not() -> None:
    for text in ("https://lb.example/lbproxy", "http://lb.example"):
        assert addresses.url(text) == text
        with pytest.raises(ArgumentTypeError):
            addresses.listener(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("60", 60), ("1.5", 1.5), ("250ms", 0.25), ("9s", 9), ("2m", 120), ("1h", 3600)]
)
def test_durations_are_written_as_in_the_settings(text: str, seconds: float) -> None:
    for words in (["drain", "a", "--timeout"], ["demo", "--duration"], ["mock", "--ttft"], ["mock", "--wake-time"]):
        parsed = vars(_parser().parse_args([*words, text]))
        assert parsed[words[-1].removeprefix("--").replace("-", "_")] == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1", "2 m", "1d", "nan", "1e3", "9" * 400])
def test_what_is_no_duration_says_what_is_one(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["drain", "a", f"--timeout={text}"])
    assert "expected a duration such as 60, 60s or 2m" in capsys.readouterr().err


def test_every_command_takes_both_forms() -> None:
    """By one parser; its default is one of them."""
    for words in (["demo"], ["status"], ["top"], ["drain", "x"], ["undrain", "x"], ["explain", "x"]):
        both = [_parser().parse_args([*words, "--admin", form]).admin for form in ("h:1", "http://h:1")]
        assert both[0] == both[1]
        default = _parser().parse_args(words).admin
        assert default == (addresses.ADMIN if words == ["demo"] else f"http://{addresses.ADMIN}")


# --- A running one ----------------------------------------------------------------------------------------------------


@contextmanager
def terminal(*arguments: str) -> Iterator[Callable[[str], None]]:
    """A command in a terminal of 80 columns and 24 lines. Yields what waits until it shows a text."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    # Without job control a shell has this signal ignored in what it starts in the background: q must end it there, too.
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen([*LBPROXY, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    signal.signal(signal.SIGINT, ignored)
    os.close(theirs)
    shown = b""

    def wait_for(pattern: str) -> None:
        nonlocal shown
        end = time.monotonic() + 30
        while not re.search(pattern, shown.decode("utf-8", "replace")):
            assert time.monotonic() < end, shown
            if select.select([ours], [], [], 0.2)[0]:
                shown += os.read(ours, 1 << 16)
        shown = b""

    try:
        yield wait_for
        os.write(ours, b"q")
        end = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < end:
            if select.select([ours], [], [], 0.05)[0]:  # it restores its terminal once we took what it showed
                with suppress(OSError):
                    os.read(ours, 1 << 16)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_top_is_live_and_survives_that_lbproxy_goes(tmp_path: Path) -> None:
    with (
        mock("--speed", "20") as (_, url),
        lbproxy(tmp_path, [f"{{url: '{url}', name: gpu-1}}"]) as (process, _, admin),
        terminal("top", "--admin", admin) as shows,
    ):
        shows(r"gpu-1 +.*up")
        httpx.post(f"{admin}/admin/endpoints/gpu-1/drain", headers=changing(admin))
        shows(r"gpu-1 +.*drained")
        process.stop()
        shows("reconnecting")


def test_status_and_explain_as_json(tmp_path: Path) -> None:
    with mock("--speed", "20") as (_, url), lbproxy(tmp_path, [url]) as (process, listen, admin):
        process.wait_for("serves sim")
        body = {"model": "sim", "prompt": "x", "max_tokens": 1}
        httpx.post(f"{listen}/v1/completions", json=body, headers={"x-request-id": "mine"})
        for command, key in ((["status"], "endpoints"), (["explain", "mine"], "decisions")):
            done = subprocess.run(
                [*LBPROXY, *command, "--json", "--admin", admin], capture_output=True, text=True, check=True
            )
            assert json.loads(done.stdout)[key]
