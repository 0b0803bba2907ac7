# SPDX-License-Identifier: Apache-2.0
"""The admin API of a running lbproxy before simulated servers: seen, drained, changed, explained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.aio import run
from tests.support.aio import until as wait_until
from tests.support.process import Process, changing, lbproxy, mock

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[str]]:
    """Two simulated servers; the second takes its time."""
    with mock("--speed", "20") as (_, one), mock("--speed", "0.2") as (_, two):
        yield [one, two]


def named(fleet: list[str]) -> list[str]:
    return [f"{{url: '{url}', name: gpu-{n}}}" for n, url in enumerate(fleet, 1)]


def ask(url: str, request_id: str, **more: object) -> httpx.Response:
    body = {"model": "sim", "prompt": "Say something nice.", "max_tokens": 5, "stream": True, **more}
    headers = {"x-request-id": request_id, "x-lbproxy-explain": "1"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def until(admin: str, path: str, wanted: Callable[[Any], bool]) -> None:
    """Wait until what the path says is as wanted."""
    run(wait_until(lambda: wanted(httpx.get(f"{admin}{path}").json()), path))


def both_up(state: dict[str, Any]) -> bool:
    return [one["health"] for one in state["endpoints"]] == ["up", "up"]


def kinds(process: Process) -> list[object]:
    return [line["message"] for line in process.lines("admin")]


def test_a_request_can_be_explained(fleet: list[str], tmp_path: Path) -> None:
    more = "explain: {header: true, requests: 2}"
    with lbproxy(tmp_path, named(fleet), more) as (_, url, admin):
        until(admin, "/admin/state", both_up)
        answer = ask(url, "first")
        assert answer.status_code == 200
        header = answer.headers["x-lbproxy-explain"]
        assert header.startswith(f"endpoint={answer.headers['x-lbproxy-endpoint']}; cost=")
        assert "candidates=2; next=gpu-" in header
        until(admin, "/admin/decisions/first", lambda found: not found["running"])  # a worker says so a moment later
        found = httpx.get(f"{admin}/admin/decisions/first").json()
        assert (found["outcome"], found["attempts"]) == ("completed", 1)
        assert found["predicted"]["first_byte_ms"] > 0
        assert found["observed"]["first_byte_ms"] > 0
        (decision,) = found["decisions"]
        assert decision["endpoint"] == found["endpoint"]
        assert [one["chosen"] for one in decision["shown"]].count(True) == 1
        for one in decision["shown"]:
            assert sum(one["parts"].values()) == pytest.approx(one["cost"], abs=0.01)

        plain = httpx.post(f"{url}/v1/completions", json={"model": "sim", "prompt": "x", "max_tokens": 1})
        assert "x-lbproxy-explain" not in plain.headers, "nobody asked"
        ask(url, "third")
        assert httpx.get(f"{admin}/admin/decisions/first").status_code == 404, "two are kept"
        ids = [one["id"] for one in httpx.get(f"{admin}/admin/decisions").json()["decisions"]]
        assert ids == ["third", plain.headers["x-request-id"]]
        assert (
            httpx.post(f"{url}/v1/completions", json={"model": "no"}, headers={"x-request-id": "no"}).status_code == 404
        )
        assert httpx.get(f"{admin}/admin/decisions/no").json()["outcome"] == "model_not_found"


def test_nothing_is_told_of_the_fleet_unless_the_settings_allow_it(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, named(fleet), "explain: {requests: 0}") as (_, url, admin):
        until(admin, "/admin/state", both_up)
        assert "x-lbproxy-explain" not in ask(url, "first").headers
        assert httpx.get(f"{admin}/admin/decisions/first").status_code == 404
        assert httpx.get(f"{admin}/admin/decisions").json() == {"decisions": []}


def test_a_drain_ends_when_its_requests_have(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, named(fleet)[1:]) as (process, url, admin):
        until(admin, "/admin/state", lambda state: state["endpoints"][0]["health"] == "up")

        async def main() -> None:
            async with httpx.AsyncClient(timeout=60) as client:
                body = {"model": "sim", "prompt": "x", "max_tokens": 30, "stream": True}
                async with client.stream(
                    "POST", f"{url}/v1/completions", json=body, headers={"x-request-id": "long"}
                ) as answer:
                    running = (await client.get(f"{admin}/admin/decisions/long")).json()
                    assert (running["running"], running["outcome"]) == (True, None)
                    drained = await client.post(f"{admin}/admin/endpoints/gpu-2/drain", headers=changing(admin))
                    assert drained.json()["in_flight"] == 1
                    assert drained.json()["drained"] is False
                    refused = await client.post(f"{url}/v1/completions", json=body)
                    assert refused.status_code == 503, "it gets nothing new"
                    data = b"".join([chunk async for chunk in answer.aiter_bytes()])
                    assert data.endswith(b"data: [DONE]\n\n"), "and what it has finishes"

        run(main())
        until(admin, "/admin/endpoints/gpu-2", lambda one: one["in_flight"] == 0)
        again = httpx.post(f"{admin}/admin/endpoints/gpu-2/drain", headers=changing(admin)).json()
        assert again == {
            "name": "gpu-2",
            "draining": True,
            "leaving": False,
            "in_flight": 0,
            "awaiting_first_byte": 0,
            "drained": True,
        }
        assert httpx.post(f"{admin}/admin/endpoints/gpu-2/undrain", headers=changing(admin)).json()["draining"] is False
        assert ask(url, "after").status_code == 200
        assert kinds(process) == ["endpoint gpu-2 is draining", "endpoint gpu-2 takes requests again"]


def test_endpoints_come_and_go_and_a_reload_knows_which_to_keep(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, named(fleet)[:1]) as (_, url, admin):

        def names() -> dict[str, str]:
            listed = httpx.get(f"{admin}/admin/endpoints").json()["endpoints"]
            return {one["name"]: one["from"] for one in listed}

        refused = httpx.post(f"{admin}/admin/endpoints", json={"url": "ftp://x", "nam": "y"}, headers=changing(admin))
        assert refused.status_code == 422
        problems = refused.json()["error"]["problems"]
        assert problems[0].startswith("url: expected http://host:port")
        assert problems[1] == "nam: unknown key, did you mean name?"
        twice = httpx.post(f"{admin}/admin/endpoints", json={"url": fleet[0], "name": "again"}, headers=changing(admin))
        assert twice.json()["error"]["problems"][0].startswith("url: expected another url than endpoints[0] has")
        added = httpx.post(
            f"{admin}/admin/endpoints", json={"url": fleet[1], "name": "gpu-2", "keep": True}, headers=changing(admin)
        )
        assert added.status_code == 201
        httpx.post(
            f"{admin}/admin/endpoints",
            json={"url": "http://127.0.0.1:9", "name": "gone", "health": None},
            headers=changing(admin),
        )
        assert names() == {"gpu-1": "settings", "gpu-2": "added, kept by a reload", "gone": "added"}
        until(admin, "/admin/endpoints/gpu-2", lambda one: one["health"] == "up")

        removed = httpx.delete(f"{admin}/admin/endpoints/gpu-1", headers=changing(admin)).json()
        assert removed["note"] == "it is in the settings file, so a reload or a restart restores it"
        assert ask(url, "elsewhere").headers["x-lbproxy-endpoint"] in {"gpu-2", "gone"}
        assert httpx.post(f"{admin}/admin/reload", headers=changing(admin)).json() == {
            "reloaded": True,
            "endpoints": 2,
            "changed": ["endpoints.gpu-1 is new", "endpoints.gone is gone"],
            "at_next_start": [],
        }
        assert names() == {"gpu-1": "settings", "gpu-2": "added, kept by a reload"}
        assert httpx.delete(f"{admin}/admin/endpoints/gpu-2", headers=changing(admin)).json()["note"] is None
        last = httpx.delete(f"{admin}/admin/endpoints/gpu-1", headers=changing(admin))
        assert (last.status_code, last.json()["error"]["code"]) == (409, "last_endpoint")
        assert httpx.delete(f"{admin}/admin/endpoints/gpu-9", headers=changing(admin)).status_code == 404


def test_a_reload_says_what_is_wrong_and_the_log_level_can_be_changed(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, named(fleet)[:1]) as (process, url, admin):
        config = tmp_path / "cfg.yaml"
        good = config.read_text()
        config.write_text(good + "routing: {polcy: x}\nretry: {attempts: 0}\n")
        refused = httpx.post(f"{admin}/admin/reload", headers=changing(admin))
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "settings_refused")
        assert len(refused.json()["error"]["problems"]) == 2
        assert httpx.get(f"{admin}/admin/state").json()["settings"]["accepted"] is False

        assert httpx.put(f"{admin}/admin/log-level", json={"level": "error"}, headers=changing(admin)).json() == {
            "level": "error"
        }
        assert httpx.get(f"{admin}/admin/config").json()["log"]["level"] == "error"
        ask(url, "unheard")
        config.write_text(good)
        assert httpx.post(f"{admin}/admin/reload", headers=changing(admin)).status_code == 200
        assert httpx.get(f"{admin}/admin/log-level").json() == {"level": "info"}
        ask(url, "heard")
        process.wait_for('"id":"heard"')
        assert [line["id"] for line in process.lines("request")] == ["heard"]


def test_events_show_the_state_as_it_becomes(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, named(fleet)) as (process, _, admin):

        async def main() -> None:
            async with (
                httpx.AsyncClient(base_url=admin, timeout=30) as client,
                client.stream("GET", "/admin/events") as one,
            ):
                assert one.headers["content-type"] == "text/event-stream; charset=utf-8"
                drained, told = False, False
                async for line in one.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    state = json.loads(line.removeprefix("data: "))
                    assert set(state) >= {"endpoints", "queue", "decisions", "history", "transitions"}
                    if drained and state["endpoints"][1]["draining"]:
                        told = True
                        break
                    if not drained:
                        await client.post("/admin/endpoints/gpu-2/drain", headers=changing(admin))
                        drained = True
                assert told

        run(main())
        assert process.stop() == 0, "also with viewers it ends"


def test_with_a_token_only_who_sends_it_may(fleet: list[str], tmp_path: Path) -> None:
    text = "admin: {host: 127.0.0.1, port: 0, token: '0123456789abcdef0123'}\n"
    with lbproxy(tmp_path, named(fleet)[:1], "") as (process, _, _):
        process.stop()
    config = tmp_path / "cfg.yaml"
    config.write_text(config.read_text().replace("admin: 127.0.0.1:0\n", text))
    with Process("--config", str(config)) as process:
        admin = process.wait_for(r"admin on (http://[\w.:]+)")[1]
        assert httpx.get(f"{admin}/admin/config").status_code == 401
        answer = httpx.get(f"{admin}/admin/config", headers={"authorization": "Bearer 0123456789abcdef0123"})
        assert answer.json()["admin"]["token"] == "***"
        assert b"0123456789" not in answer.content
