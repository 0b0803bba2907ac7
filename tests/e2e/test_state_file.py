# SPDX-License-Identifier: Apache-2.0
"""lbproxy is stopped, killed, replaced: what it learned is there again, and a file that cannot be used ends nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.aio import run, until
from tests.support.process import lbproxy, mock

PROMPT = "A long document that several questions are about. " * 200


def settings(folder: Path, more: str = "") -> str:
    return f"state: {{file: {folder / 'state'}, interval: 1s{more}}}"


def ask(listen: str, prompt: str = PROMPT) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 2}
    assert httpx.post(f"{listen}/v1/completions", json=body, timeout=30).status_code == 200


def value(admin: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{admin}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def predicted(admin: str) -> float:
    """Cached prompt tokens that lbproxy predicted in the requests that it had."""
    return value(admin, 'lbproxy_cached_prompt_tokens_total{kind="predicted"}')


def wait_for_write(admin: str, folder: Path) -> None:
    """What was asked so far is in the file."""
    before = value(admin, 'lbproxy_state_writes_total{result="written"}')
    run(until(lambda: value(admin, 'lbproxy_state_writes_total{result="written"}') > before + 1))
    assert (folder / "state").exists()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_process_knows_what_the_last_one_learned(end: signal.Signals, tmp_path: Path) -> None:
    with mock("--model", "m") as (_, url):
        with lbproxy(tmp_path, [url], settings(tmp_path)) as (process, listen, admin):
            process.wait_for("serves m")
            ask(listen)
            if end is signal.SIGKILL:
                wait_for_write(admin, tmp_path)
                process.kill()
            else:
                assert process.stop() == 0
        with lbproxy(tmp_path, [url], settings(tmp_path)) as (process, listen, admin):
            process.wait_for("restored 1 endpoints and 1 prompts")
            process.wait_for("serves m")
            ask(listen)
            assert predicted(admin) > 1000.0
            assert value(admin, "lbproxy_state_age_at_start_seconds") < 60.0
            state = httpx.get(f"{admin}/admin/state").json()["state_file"]
            assert state["age_at_start_s"] is not None


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_budget_is_spent_once(workers: int, end: signal.Signals, tmp_path: Path) -> None:
    """Under a policy that learns nothing. 1200 of 1300 tokens a day are used before the restart."""

    def post(listen: str, tokens: int) -> int:
        body = {"model": "m", "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(f"{listen}/v1/completions", json=body, timeout=30).status_code

    more = f"{settings(tmp_path)}\nrouting: {{policy: least-request}}\nworkers: {workers}"
    share = 'lbproxy_endpoint_limit_used_ratio{endpoint="own",limit="tokens_per_day"}'
    with mock("--model", "m", "--speed", "100") as (_, url):
        endpoint = f"{{url: {url}, name: own, tokens_per_day: 1300}}"
        with lbproxy(tmp_path, [endpoint], more) as (process, listen, admin):
            process.wait_for("serves m")
            assert post(listen, 1200) == 200
            used = value(admin, share)
            assert 0.92 < used < 0.95
            if end is signal.SIGTERM:
                assert process.stop() == 0
            else:
                wait_for_write(admin, tmp_path)
                process.kill()
        with lbproxy(tmp_path, [endpoint], more) as (process, listen, admin):
            process.wait_for("restored what 1 endpoints and 0 flows used of their limits")
            process.wait_for("serves m")
            assert value(admin, share) == pytest.approx(used)
            assert post(listen, 1200) == 429
            assert post(listen, 10) == 200


def test_a_server_that_was_restarted_meanwhile_has_nothing_cached(tmp_path: Path) -> None:
    with mock("--model", "m") as (_, url):
        port = url.rpartition(":")[2]
        with lbproxy(tmp_path, [url], settings(tmp_path)) as (process, listen, _):
            process.wait_for("serves m")
            ask(listen)
            process.stop()
    with mock("--model", "m", "--port", port) as (_, again):
        assert again == url
        with lbproxy(tmp_path, [url], settings(tmp_path)) as (process, listen, admin):
            process.wait_for("restored 1 endpoints and 1 prompts")
            seen = "lbproxy_endpoint_metrics_age_seconds{"
            run(until(lambda: seen in httpx.get(f"{admin}/metrics").text, "its metrics were read"))
            ask(listen)
            assert predicted(admin) == 0.0


def test_a_successor_reads_what_was_written_at_the_hand_over_and_writes_from_then_on(tmp_path: Path) -> None:
    with mock("--model", "m") as (_, url):
        more = f"state: {{file: {tmp_path / 'state'}, interval: 1h}}"  # only the hand-over writes
        with lbproxy(tmp_path, [url], more) as (process, listen, _):
            process.wait_for("serves m")
            ask(listen)
            process.process.send_signal(signal.SIGUSR2)
            pid = int(process.wait_for(r'"pid":(\d+)')[1])
            try:
                text = process.read()
                assert "restored 1 endpoints and 1 prompts" in text
                process.process.wait(30)
                before = (tmp_path / "state").stat().st_mtime_ns
            finally:
                os.kill(pid, signal.SIGTERM)
            run(until(lambda: (tmp_path / "state").stat().st_mtime_ns > before, "the successor wrote at its stop"))
            assert "is written by" not in process.read()


def test_a_successor_writes_while_the_old_process_still_streams(tmp_path: Path) -> None:
    slow = ("--ttft", "0.01", "--token-time", "0.2")
    with (
        mock("--model", "m", *slow) as (_, url),
        lbproxy(tmp_path, [url], settings(tmp_path)) as (process, listen, admin),
    ):
        process.wait_for("serves m")
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{listen}/v1/completions", json=body, timeout=30) as stream:
            parts = stream.iter_raw()
            next(parts)
            process.process.send_signal(signal.SIGUSR2)
            pid = int(process.wait_for(r'"pid":(\d+)')[1])
            try:
                wait_for_write(admin, tmp_path)
                next(parts)
                assert process.process.poll() is None
            finally:
                os.kill(pid, signal.SIGTERM)


def test_an_unusable_file_and_an_unwritable_one_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"\xff\x00 no such file \n" * 1000)
    with mock("--model", "m") as (_, url):
        with lbproxy(tmp_path, [url], settings(tmp_path)) as (process, listen, _):
            process.wait_for("starts as new")
            process.wait_for("serves m")
            ask(listen)
            assert process.stop() == 0
        nowhere = "state: {file: /proc/lbproxy/state, interval: 1s}"
        with lbproxy(tmp_path, [url], nowhere) as (process, listen, admin):
            process.wait_for("cannot be written")
            ask(listen)
            failed = 'lbproxy_state_writes_total{result="failed"}'
            run(until(lambda: value(admin, failed) > 0.0, "a write was tried"))
            assert process.stop() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_does_not_respond_holds_no_stop(workers: int, tmp_path: Path) -> None:
    """Neither the write that waits for it nor the end of its thread: Python waits for those of a pool for ever."""
    os.mkfifo(tmp_path / "state.tmp")  # opening it to write waits for a reader, as a file system does that hangs
    more = f"{settings(tmp_path)}\nworkers: {workers}"
    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url], more) as (process, listen, _):
        process.wait_for("serves m")
        ask(listen)
        assert process.stop(within_s=30.0) == 0
        if workers == 1:  # else the supervisor ends the balancer process, at about the same time
            assert "cannot be written within 10 s" in process.output
