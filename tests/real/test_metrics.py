# SPDX-License-Identifier: Apache-2.0
"""What lbproxy reads of real servers: every gauge, none missing, equal to what the server itself shows under load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from tests.real.load import Load
from tests.real.servers import Fleet, wait_until

SIGNALS = ("waiting", "running", "kv_utilization", "block_size_tokens", "kv_blocks")


def test_every_signal_of_vllm_is_found(fleet: Fleet, found: Callable[[str], None]) -> None:
    for server in fleet.vllm:
        for signal in SIGNALS:
            assert fleet.of("lbproxy_scrape_missing_metrics", server, f'signal="{signal}"') == 0
    # Adapters' slots are a sixth, shown from the first request for an adapter on.
    missing = fleet.family("lbproxy_scrape_missing_metrics")
    assert not any(value for labels, value in missing.items() if "vllm-" in labels)
    found(f"signals: {len(SIGNALS)} of {len(SIGNALS)} found at each vLLM ({', '.join(SIGNALS)})")


def test_gauges_move_with_the_load(fleet: Fleet, found: Callable[[str], None]) -> None:
    """The servers are asked directly, one more than it runs at a time: lbproxy must see what others do there."""
    one, two = fleet.vllm
    highest: dict[tuple[str, str], float] = defaultdict(float)

    def seen() -> bool:
        for server in fleet.vllm:
            for name in ("waiting", "running", "kv_utilization"):
                value = fleet.of(f"lbproxy_endpoint_{name}", server)
                highest[server.name, name] = max(value, highest[server.name, name])
        return all(highest[name, gauge] >= least for (name, gauge), least in wanted.items())

    wanted = {
        (one.name, "running"): 6,
        (two.name, "running"): 8,
        (two.name, "waiting"): 1,
        (one.name, "kv_utilization"): 0.1,
        (two.name, "kv_utilization"): 0.1,
    }
    with Load(one.url, workers=6, max_tokens=300), Load(two.url, workers=14, max_tokens=300):
        wait_until(seen, f"all of {wanted}")
    wait_until(lambda: sum(fleet.of("lbproxy_endpoint_running", server) for server in fleet.vllm) == 0, "back to 0")
    for (name, gauge), value in sorted(highest.items()):
        found(f"signals: {name} {gauge}: highest seen {value:.3g}, back to 0 afterwards")


def test_a_server_without_metrics_is_used_all_the_same(fleet: Fleet, found: Callable[[str], None]) -> None:
    assert fleet.is_up(fleet.transformers)
    assert not fleet.of("lbproxy_scrapes_total", fleet.transformers, 'result="ok"')
    results = {key: value for key, value in fleet.family("lbproxy_scrapes_total").items() if "transformers" in key}
    found(f"signals: transformers serve is up without metrics; scrapes: {results}")
