# SPDX-License-Identifier: Apache-2.0
"""Servers that freeze and die, in processes of their own: clients whose answer had not begun see nothing of it."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.aio import run, until
from tests.support.process import lbproxy, mock

QUICK = """
routing: {policy: least-request}
health: {interval: 200ms, down_interval: 200ms, timeout: 500ms, fall: 2, slow_start: 5s}
timeouts: {connect: 1s}
"""
REQUESTS = 8


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["frozen", "killed"])
def test_who_had_no_byte_is_answered_by_another(number: signal.Signals, tmp_path: Path) -> None:
    """With the endpoint frozen, connections stay open and nothing comes: only probes tell."""
    body = {"model": "sim", "prompt": "x", "max_tokens": 300, "ignore_eos": True}
    with (
        mock("--model", "sim") as (victim, one),
        mock("--model", "sim") as (_, two),
        lbproxy(tmp_path, [one, two], QUICK) as (process, url, admin),
        ThreadPoolExecutor(REQUESTS) as clients,
        httpx.Client(timeout=60) as http,
    ):
        run(until(lambda: http.get(f"{admin}/readyz").json()["endpoints"]["up"] == 2))
        asked = [clients.submit(http.post, f"{url}/v1/completions", json=body) for _ in range(REQUESTS)]
        in_flight = f'lbproxy_endpoint_in_flight{{endpoint="{one.removeprefix("http://")}"}} 4.0'
        run(until(lambda: in_flight in http.get(f"{admin}/metrics").text, "half of them are there"))
        victim.process.send_signal(number)
        answers = [one.result() for one in asked]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-lbproxy-attempts"] for answer in answers} == {"1", "2"}
        process.wait_for(r'"to":"down"')
        again = [http.post(f"{url}/v1/completions", json={**body, "max_tokens": 2}) for _ in range(10)]
        assert {answer.headers["x-lbproxy-endpoint"] for answer in again} == {two.removeprefix("http://")}
        if number is signal.SIGSTOP:
            victim.process.send_signal(signal.SIGCONT)
            process.wait_for(r'"from":"down","to":"up"')
