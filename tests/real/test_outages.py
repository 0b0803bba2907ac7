# SPDX-License-Identifier: Apache-2.0
"""What clients see when real servers are left, full, stopped and killed: nothing, while another server has room."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable

import httpx
import pytest

from tests.real.load import Batch, Load, Result, burst, failures, told
from tests.real.servers import DRAIN_S, MODEL, QUEUE_CAP, Fleet, LlmServer, status, wait_until

Found = Callable[[str], None]
BOTH = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
LONGEST = 2000
SEQUENCES = 64
"""Tokens of one answer, nearly all that the model has room for, and answers to one request: minutes of work, so that
its gauge is seen even if the busy server answers for it late."""
BURSTS_AT_MOST = 12
WORKERS = 6
"""Clients while one server drains: the other has to take all of them."""


@BOTH
def test_a_client_that_leaves_ends_the_generation(fleet: Fleet, stream: bool, found: Found) -> None:
    """vLLM's own gauge goes up and back to 0, and its counter says that most of the tokens were never made."""

    def total(read: Callable[[LlmServer], float]) -> float:
        return sum(read(server) for server in fleet.vllm)

    before = total(LlmServer.generated_tokens)
    asked = {"model": MODEL, "prompt": "x", "n": SEQUENCES, "max_tokens": LONGEST, "ignore_eos": True}
    body = json.dumps({**asked, "stream": stream})
    address = httpx.URL(fleet.url)
    with socket.create_connection((address.host, address.port or 80)) as sock:
        sock.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        wait_until(lambda: total(LlmServer.running) >= 1, "running")
    left = time.monotonic()
    wait_until(lambda: total(LlmServer.running) == 0, "it stopped")
    took_ms = (time.monotonic() - left) * 1000
    made = total(LlmServer.generated_tokens) - before
    assert made < SEQUENCES * LONGEST, "it ran to its end"
    found(
        f"disconnect, {'stream' if stream else 'whole answer'}: vLLM's running gauge up, then 0 within {took_ms:.0f} "
        f"ms of the client leaving; {made:.0f} of {SEQUENCES * LONGEST:,} tokens made"
    )


@BOTH
def test_a_full_server_is_not_noticed_while_another_has_room(fleet: Fleet, stream: bool, found: Found) -> None:
    """vllm-1 refuses what is over its cap, to be tried "on a different instance": the other one is that instance.

    It says so with a 503. In a burst of streams some of them are let in and refused a moment later: those get a 200,
    and an error with the code 503 as their only event.
    """
    kind = "streams" if stream else "whole answers"
    capped = fleet.vllm[0]
    direct = bursts(capped.url, 3 * QUEUE_CAP, lambda one: "different instance" in one.error, least=1, stream=stream)
    found(f"queue overflow, {kind}: {capped.name} asked directly, {3 * QUEUE_CAP} at once: {told(direct)}")
    # Half of each burst goes to either at first, twice what one of them takes; what lbproxy learns may call for more.
    results = bursts(fleet.url, 4 * QUEUE_CAP, lambda one: one.attempts > 1, least=3, stream=stream)
    found(f"queue overflow, {kind}: through lbproxy, {4 * QUEUE_CAP} at once: {told(results)}")
    assert failures(results) == []


def bursts(url: str, size: int, refused: Callable[[Result], bool], *, least: int, stream: bool) -> list[Result]:
    """So many at once, again until some of them were refused, and `least` times. AssertionError if none ever is.

    vLLM counts a request only once its prompt is tokenized: of those that come in the same moment it may refuse none.
    """
    results: list[Result] = []
    for sent in range(1, BURSTS_AT_MOST + 1):
        results += burst(url, size, 400, stream=stream)
        if sent >= least and any(refused(one) for one in results):
            return results
    raise AssertionError(f"it was never full, so this proves nothing: {results}")


def test_kill_and_restart(fleet: Fleet, found: Found) -> None:
    """Whatever is sent after a kill -9 is answered; the server takes requests again once it is back."""
    with Load(fleet.url, workers=4, max_tokens=24) as load:
        wait_until(lambda: len(load.results) >= 20, "it is under load")
        victim = max(fleet.vllm, key=lambda server: load.answered(server.name))
        killed = time.monotonic()
        victim.kill()
        wait_until(lambda: not fleet.is_up(victim), "it is seen as down")
        down_s = time.monotonic() - killed
        wait_until(lambda: len(load.since(killed)) >= 100, "100 requests later")
    later = load.since(killed)
    broken = failures([one for one in load.results if one.began < killed])
    found(
        f"kill -9: seen as down after {down_s:.2f} s; sent after it: {told(later)}; "
        f"of the 4 under way {len(broken)} broke: {sorted(set(broken))}"
    )
    assert failures(later) == []
    restarted = time.monotonic()
    victim.start()
    victim.wait_until_ready()
    ready = time.monotonic()
    wait_until(lambda: fleet.is_up(victim), "it is seen as up")
    up = time.monotonic()
    with Load(fleet.url, workers=8, max_tokens=24) as load:
        wait_until(lambda: load.answered(victim.name) >= 5, "it is used again")
    assert failures(load.results) == []
    found(
        f"restart: vLLM ready after {ready - restarted:.0f} s, in rotation {up - ready:.2f} s later; "
        f"{told(load.results)}"
    )


def test_a_draining_server_is_not_noticed(fleet: Fleet, found: Found) -> None:
    """While it drains, vLLM answers 500 to every new request and 200 to /health, and is the least loaded of all.

    A long request through lbproxy keeps it draining for a while, and must end whole.
    """
    other, victim = fleet.vllm
    # An adapter's first request after a restart stops vLLM for seconds, and what is held would not run with the rest.
    Batch(fleet.url, 1, 8, stream=False, model="c").begin().results()
    held = Batch(fleet.url, 1, LONGEST, stream=True, model="c")  # only the victim has this adapter
    # The other is the more loaded one, so that both are used; with all that follows it still is within its cap.
    same = Batch(other.url, QUEUE_CAP - WORKERS, LONGEST, stream=True)
    same.begin()
    held.begin()
    # By what comes: a vLLM that was just restarted answers for its gauges seconds later while it generates.
    wait_until(lambda: held.streaming == 1 and same.streaming == QUEUE_CAP - WORKERS, "they run")
    # At most 12 a second: every one of them may need a retry, and the retry budget is 10 a second and a fifth.
    with Load(fleet.url, workers=WORKERS, max_tokens=24, pause_s=0.5) as load:
        wait_until(lambda: load.answered(victim.name) >= 5, "both are used")
        victim.terminate()
        stopped = time.monotonic()
        seen = Counter(what_a_draining_server_says(victim))
        lived_s, ended = time.monotonic() - stopped, not victim.alive
        victim.kill()
        since_exit = time.monotonic()
        wait_until(lambda: len(load.since(since_exit)) >= 50, "50 requests later")
    long = held.results()
    same.results()
    said = ", ".join(f"/health {health} and completion {answer}: {n} times" for (health, answer), n in seen.items())
    how = "ended by itself" if ended else "never ended: it was killed"
    found(f"drain: after SIGTERM {victim.name} lived {lived_s:.1f} s and {how}; asked directly meanwhile: {said}")
    found(f"drain: the long request that it had: {told(long)}")
    found(f"drain: steady load through lbproxy, after SIGTERM: {told(load.since(stopped))}")
    assert (200, 500) in seen, "it never was in the state that this test is about"
    assert failures(long) == []
    assert failures(load.results) == []
    # uvicorn closes idle connections once; one that it accepts just then stays for as long as somebody uses it.
    assert ended, "lbproxy's probes kept a connection in use, so the server did not end"


def what_a_draining_server_says(server: LlmServer) -> list[tuple[int | None, int | None]]:
    """Statuses of /health and of a completion, asked directly until the process is gone, or should be."""
    seen = []
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    end = time.monotonic() + DRAIN_S + 30
    while server.alive and time.monotonic() < end:
        try:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code
        except httpx.HTTPError:
            answer = None
        seen.append((status(f"{server.url}/health"), answer))
        time.sleep(0.05)
    return seen
