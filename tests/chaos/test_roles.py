# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart, and each server of a pair fails in every way: T50."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.load import how_many, needless, silent, told
from tests.chaos.rig import QUICK, Rig, Server, wait
from tests.chaos.verdict import pick

LEASE_S = 3
"""Of what a prefill server holds."""
SHAPES = {
    "prefill": ["kill", "freeze", "refuse for=2", "status code=503 for=2", "status code=500 share=0.5 for=2"],
    "decode": ["kill", "freeze", "status code=503 for=2", "status code=500 share=0.5 for=2", "break events=0 for=2"],
}
"""What happens to one server of each role."""


@contextmanager
def apart(folder: Path) -> Iterator[dict[str, list[Server]]]:
    """Two servers of each role."""
    options = ["--connector", "nixl", "--kv-lease", str(LEASE_S)]
    servers = {
        role: [Server(folder / f"{role}-{n}.log", "--role", role, *options) for n in range(2)] for role in SHAPES
    }
    try:
        for one in (*servers["prefill"], *servers["decode"]):
            one.ready()
        yield servers
    finally:
        for one in (*servers["prefill"], *servers["decode"]):
            one.close()


def befall(server: Server, what: str) -> None:
    """It fails for two seconds, and is well again."""
    if what == "kill":
        server.kill()
        time.sleep(1.0)
        server.launch()
        server.ready()
    elif what == "freeze":
        server.stop()
        time.sleep(2.0)
        server.go_on()
    else:
        server.fault(what)
        time.sleep(2.2)
        server.healed()


@pytest.mark.chaos("T50", "prefill and decode apart: one server of each role is killed, freezes, refuses, breaks")
def test_t50_roles(rig: Rig) -> None:
    case = rig.case
    with apart(rig.folder) as servers:
        every = [*servers["prefill"], *servers["decode"]]
        own = Rig(case, every, rig.folder)
        listed = [
            f"{{url: {one.url}, role: {role}, connector: nixl}}" for role, those in servers.items() for one in those
        ]
        settings = QUICK + "routing: {split: always}\nretry: {budget_per_second: 1000}\n"
        with own.proxy(settings, endpoints=listed) as proxy:
            wait(lambda: proxy.total("lbproxy_endpoint_up") == len(every), "all are up")
            with own.load(proxy, workers=pick(8, 16, 60), tokens=30, prompt_bytes=6000) as load:
                load.until(good=10)
                for role, shapes in SHAPES.items():
                    for what in shapes:
                        befall(servers[role][0], what)
                        wait(lambda: proxy.total("lbproxy_endpoint_up") == len(every), f"{role} is up after {what}", 60)
                        print(f"{role}: {what}: {told(load.results())}")
            results = load.results()
            case.figure("requests", len(results))
            case.expect("UF", needless(results), at_most=0)
            case.expect("SF", silent(results), at_most=0)
            case.expect("hung", how_many(results, "hung"), at_most=0)
            served = sum(one.metric("vllm:prompt_tokens_total") > 0 for one in every)
            case.expect("servers that took part", served, at_least=len(every))
            wait(lambda: not any(one.running() for one in every), "nothing runs")
            held = [one.metric("vllm:kv_cache_usage_perc") for one in servers["prefill"]]
            wait(
                lambda: not any(one.metric("vllm:kv_cache_usage_perc") for one in servers["prefill"]),
                "nothing is held any more",
                3.0 * LEASE_S,
            )
            case.figure("KV held just after, share of the cache", round(max(held), 4))
            lost = sum(one.metric("vllm:nixl_num_kv_expired_reqs_total") for one in servers["prefill"])
            case.figure("prompts that nobody fetched within the lease", lost)
