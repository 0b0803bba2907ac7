# SPDX-License-Identifier: Apache-2.0
"""Flows in lbproxy as installed: what a client of OpenAI's SDK sees, the metrics, the log and the admin state."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.process import changing, lbproxy, mock

SETTINGS = """
auth: {keys: [{name: team-a, key: sk-aaaaaaaaaaaaaaaaaaaa}, {name: team-b, key: sk-bbbbbbbbbbbbbbbbbbbb}]}
admission: {max_in_flight_per_endpoint: 1}
flows:
  named:
    team-b: {requests_per_minute: 2, weight: 2}
"""
BODY = {"model": "m", "prompt": "x", "max_tokens": 1}


def key(name: str) -> str:
    return f"sk-{name * 20}"


def test_flows_of_keys_from_the_client_to_the_dashboard(tmp_path: Path) -> None:
    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url], SETTINGS) as (process, listen, admin):
        process.wait_for("serves m")
        httpx.put(f"{admin}/admin/log-level", json={"level": "info"}, headers=changing(admin))
        client = openai.OpenAI(base_url=f"{listen}/v1", api_key=key("b"), max_retries=0)
        for _ in range(2):
            assert client.completions.create(model="m", prompt="x", max_tokens=1).choices
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model="m", prompt="x", max_tokens=1)
        assert (error.value.code, error.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        assert "Flow `team-b` has reached its limit of requests a minute, 2" in error.value.message
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 30
        # A long answer takes the only place; another waits, and the state says whose it is.
        long = {**BODY, "max_tokens": 4000, "stream": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key('a')}"}
        with (
            httpx.Client(timeout=30) as http,
            http.stream("POST", f"{listen}/v1/completions", json=long, headers=headers) as first,
        ):
            assert first.status_code == 200
            pieces = first.iter_bytes()
            next(pieces)
            with httpx.Client(timeout=60) as other:
                thread = threading.Thread(
                    target=lambda: other.post(f"{listen}/v1/completions", json=BODY, headers=headers)
                )
                thread.start()
                by_flow: dict[str, int] = {}
                end = time.monotonic() + 20
                while not by_flow:
                    assert time.monotonic() < end
                    by_flow = httpx.get(f"{admin}/admin/state").json()["queue"]["by_flow"]
                assert by_flow == {"team-a": 1}
                page = httpx.get(f"{admin}/metrics").text
                assert 'lbproxy_flow_waiting_requests{flow="team-a"} 1.0' in page
                assert 'lbproxy_flow_in_flight{flow="team-a"} 1.0' in page
                assert 'lbproxy_flow_refused_total{flow="team-b"} 1.0' in page
                assert 'lbproxy_flow_served_tokens_total{flow="team-b"}' in page
                pieces.close()  # type: ignore[attr-defined]
                first.close()
                thread.join(30)
                assert not thread.is_alive()
        keys = [json.loads(line).get("key") for line in process.read().splitlines() if '"event":"request"' in line]
        assert "team-b" in keys


def test_the_header_is_in_the_log_where_it_is_not_the_key(tmp_path: Path) -> None:
    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url]) as (process, listen, _):
        process.wait_for("serves m")
        reply = httpx.post(f"{listen}/v1/completions", json=BODY, headers={"x-lbproxy-flow": "user-7"})
        assert reply.status_code == 200
        process.wait_for('"flow":"user-7"')


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_models_of_a_key_as_an_sdk_sees_them_and_after_a_reload(tmp_path: Path, workers: str) -> None:
    """Two models; the key of each team has one, and OpenAI's SDK raises what it raises for one that nobody serves."""
    named = "flows: {named: {team-a: {models: [m]}, team-b: {models: ['o*']}}}\n"
    auth = SETTINGS[: SETTINGS.index("admission")]
    with (
        mock("--model", "m") as (_, first),
        mock("--model", "other") as (_, second),
        lbproxy(tmp_path, [first, second], auth + workers + named) as (process, listen, _),
    ):
        process.wait_for("serves m")
        process.wait_for("serves other")
        clients = {
            name: openai.OpenAI(base_url=f"{listen}/v1", api_key=key(name), max_retries=0, timeout=60) for name in "ab"
        }

        def listed(name: str) -> list[str]:
            return [one.id for one in clients[name].models.list()]

        def ask(name: str, model: str) -> object:
            return clients[name].completions.create(model=model, prompt="x", max_tokens=1).choices

        assert (listed("a"), listed("b")) == (["m"], ["other"])
        assert ask("a", "m")
        assert ask("b", "other")
        said = []
        for name, model in (("a", "other"), ("a", "nobody"), ("b", "m")):
            with pytest.raises(openai.NotFoundError) as error:
                ask(name, model)
            assert error.value.code == "model_not_found"
            said.append(error.value.message.replace(f"`{model}`", "`MODEL`"))
            with pytest.raises(openai.NotFoundError):
                clients[name].models.retrieve(model)
        assert len(set(said)) == 1
        config = tmp_path / "cfg.yaml"
        config.write_text(config.read_text().replace("team-a: {models: [m]}", "team-a: {models: null}"))
        process.process.send_signal(signal.SIGHUP)
        process.wait_for("settings reloaded")
        assert ask("a", "other")
        assert listed("a") == ["m", "other"]
        with pytest.raises(openai.NotFoundError):
            ask("b", "m")
        for client in clients.values():
            client.close()


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_what_is_left_of_a_limit_in_every_response(tmp_path: Path, workers: str) -> None:
    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url], SETTINGS + workers) as (process, listen, _):
        process.wait_for("serves m")
        client = openai.OpenAI(base_url=f"{listen}/v1", api_key=key("b"), max_retries=0, timeout=60)
        for left in ("1", "0"):
            reply = client.completions.with_raw_response.create(model="m", prompt="x", max_tokens=1)
            assert reply.headers["x-ratelimit-remaining-requests"] == left
            assert "x-ratelimit-limit-tokens" not in reply.headers
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model="m", prompt="x", max_tokens=1)
        assert error.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        assert error.value.response.headers["x-ratelimit-limit-requests"] == "2"
