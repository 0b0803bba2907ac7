# SPDX-License-Identifier: Apache-2.0
"""`lbproxy usage`: of what runs, after a kill -9, and where nothing keeps it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lbproxy.commands.cli import main
from lbproxy.control.saving.state_file import read
from lbproxy.control.saving.usage_file import once, read_usage, rows_of
from tests.support.aio import run, until
from tests.support.process import exists, lbproxy, mock

BODY = {"model": "m", "prompt": "x " * 100, "max_tokens": 5, "ignore_eos": True}


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_tokens_by_day_also_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    file = tmp_path / "kept"
    more = f"{workers}state: {{file: {file}, interval: 1s}}\n"

    def used(*arguments: str) -> dict[str, object]:
        assert main(["usage", "--json", *arguments]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["kept"]
        (row,) = found["rows"]
        return dict(row)

    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url], more) as (process, listen, admin):
        process.wait_for("serves m")
        for _n in range(3):
            headers = {"x-lbproxy-flow": "team"}
            usage = httpx.post(f"{listen}/v1/completions", json=BODY, headers=headers, timeout=60).json()["usage"]
        row = used("--admin", admin)
        prompt = int(str(row["prompt_uncached"])) + int(str(row["prompt_cached"]))
        assert (row["flow"], row["model"], row["estimated"]) == ("team", "m", 0)
        assert (prompt, row["completion"]) == (3 * usage["prompt_tokens"], 15)
        end = time.monotonic() + 60
        while not (file.exists() and rows_of(read(str(file)).tokens.values(), 9) == [row]):
            assert time.monotonic() < end
            time.sleep(0.1)
        process.kill()
    settings = tmp_path / "left.yaml"
    settings.write_text(f"endpoints: ['http://127.0.0.1:9']\nstate: {{file: {file}}}\n")
    assert used("--config", str(settings)) == row


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_what_a_process_serves_to_its_end_after_it_handed_over_is_counted(tmp_path: Path, workers: str) -> None:
    """As of its successor, which is asked; and once, also where both ended."""
    file = tmp_path / "kept"
    more = f"{workers}state: {{file: {file}, interval: 1s}}\n"
    body = BODY | {"max_tokens": 40, "stream": True, "stream_options": {"include_usage": True}}

    def completed(admin: str) -> int:
        return sum(row["completion"] for row in httpx.get(f"{admin}/admin/usage").json()["rows"])

    with (
        mock("--model", "m", "--ttft", "0.01", "--token-time", "0.1") as (_, url),
        lbproxy(tmp_path, [url], more) as (process, listen, admin),
    ):
        process.wait_for("serves m")
        httpx.post(f"{listen}/v1/completions", json=BODY, timeout=60)
        with httpx.stream("POST", f"{listen}/v1/completions", json=body, timeout=60) as stream:
            parts = stream.iter_raw()
            next(parts)
            process.process.send_signal(signal.SIGUSR2)
            pid = int(process.wait_for(r"the new process accepts connections: process (\d+)")[1])
            try:
                httpx.post(f"{listen}/v1/completions", json=BODY, timeout=60)
                assert completed(admin) <= 5 + 40 + 5
                assert b"[DONE]" in b"".join(parts)
                process.process.wait(60)
                assert completed(admin) == 5 + 40 + 5
            finally:
                os.kill(pid, signal.SIGTERM)
        run(until(lambda: not exists(pid), "the successor stopped", within_s=60))
    uses = once([*read_usage(f"{file}.usage"), *read(str(file)).tokens.values()])
    assert sum(used.completion for use in uses for used in use.rows.values()) == 5 + 40 + 5


def test_tokens_of_streams_that_report_none_are_estimated_within_a_tenth(tmp_path: Path) -> None:
    """Chat and completions of any length, of servers that send an event for each token and for five; one of five asks
    for usage, in a flow of its own.
    """
    requests = int(os.environ.get("LBPROXY_TEST_REQUESTS", "150"))  # 10,000 by hand
    rng = random.Random(7)
    expected = {"asks": 0, "silent": 0}

    def stream(client: httpx.Client, number: int, tokens: int) -> None:
        asks = number % 5 == 0
        prompt = f"{number} " + "x " * tokens
        said = {"messages": [{"role": "user", "content": prompt}]} if number % 2 else {"prompt": prompt}
        body = {"model": "m", "max_tokens": tokens, "ignore_eos": True, "stream": True, **said}
        path = "chat/completions" if number % 2 else "completions"
        flow = {"x-lbproxy-flow": "asks" if asks else "silent"}
        more = {"stream_options": {"include_usage": True}} if asks else {}
        response = client.post(f"/v1/{path}", json={**body, **more}, headers=flow)
        assert response.status_code == 200, response.text
        assert ('"usage":{' in response.text) == asks

    fast = ["--model", "m", "--speed", "50"]
    with (
        mock(*fast) as (_, one),
        mock(*fast, "--engine", "llamacpp") as (_, two),
        mock(*fast, "--stream-interval", "5") as (_, three),
        lbproxy(tmp_path, [one, two, three]) as (process, listen, admin),
        httpx.Client(base_url=listen, timeout=60) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        process.wait_for("serves m")
        sent = []
        for number in range(requests):
            tokens = rng.randrange(5, 200)
            expected["asks" if number % 5 == 0 else "silent"] += tokens
            sent.append(pool.submit(stream, client, number, tokens))
        for one_sent in sent:
            one_sent.result()
        rows = httpx.get(f"{admin}/admin/usage").json()["rows"]
    found = {row["flow"]: row["completion"] for row in rows}
    print(found, expected)
    assert found["asks"] == expected["asks"]
    assert found["silent"] == pytest.approx(expected["silent"], rel=0.1)
    assert [row["estimated"] > 0 for row in sorted(rows, key=lambda row: row["flow"])] == [False, True]


def test_where_nothing_keeps_it_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lbproxy(tmp_path, ["http://127.0.0.1:9"]) as (_, _listen, admin):
        assert main(["usage", "--admin", admin]) == 0
        said = capsys.readouterr().out
        assert "no tokens were used" in said
        assert "without `state.file`" in said
    settings = tmp_path / "left.yaml"
    settings.write_text("endpoints: ['http://127.0.0.1:9']\n")
    assert main(["usage", "--config", str(settings)]) == 1
    assert "state.file" in capsys.readouterr().err
