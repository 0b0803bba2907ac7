# SPDX-License-Identifier: Apache-2.0
"""A process that is stopped and goes on (a laptop's lid, a debugger, a starved container): nobody is blamed for it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx

from tests.support.aio import run, until
from tests.support.process import lbproxy, mock

HASTY = """
health: {interval: 100ms, down_interval: 100ms, timeout: 2s, fall: 1}
scrape: {interval: 50ms, timeout: 2s, stale_after: 2s}
timeouts: {connect: 2s, first_byte: 2s, stream_idle: 2s}
breaker: {consecutive_failures: 1, no_progress: 2s}
"""
PAUSE_S = 4.0
"""Longer than every limit above, which a busy machine keeps."""


def test_a_pause_of_ours_ejects_nobody_and_breaks_no_stream(tmp_path: Path) -> None:
    body = {"model": "sim", "prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True}
    with (
        mock("--model", "sim") as (_, one),
        mock("--model", "sim") as (_, two),
        lbproxy(tmp_path, [one, two], HASTY) as (process, url, admin),
    ):
        run(until(lambda: httpx.get(f"{admin}/readyz").json()["endpoints"]["up"] == 2))
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            pieces = answer.iter_raw()
            first = next(pieces)
            process.process.send_signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            process.process.send_signal(signal.SIGCONT)
            rest = b"".join(pieces)
        assert (first + rest).rstrip().endswith(b"[DONE]")
        for _ in range(20):
            assert httpx.post(f"{url}/v1/completions", json={**body, "stream": False, "max_tokens": 2}).is_success
        transitions = process.lines("transition")
        assert [line["to"] for line in transitions] == ["up", "up"], transitions
        assert not process.lines("scrape")
