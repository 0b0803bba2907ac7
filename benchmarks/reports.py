# SPDX-License-Identifier: Apache-2.0
"""What a load report in an answer's header costs: CPU of one request in process, without and with one.

`python -m benchmarks.reports`. A plain request of 1 KB goes through the product's fast lane, exchange and connection
pool, between transports that lead nowhere: no sockets, no kernel. Rounds of both kinds alternate, and their median (and
best) is shown. CPU is user + system time of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator

from lbproxy.config.parse import parse
from lbproxy.core.balancer import Balancer
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.engines.load_metrics import LoadMetrics
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.openai import ModelCard
from lbproxy.driver.runtime import Runtime
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.front.server import FrontEnd

REQUESTS = 1000
"""In a round."""
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 960)
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
ANSWER = b'{"id":"x","choices":[{"message":{"content":"%s"}}],"usage":{"prompt_tokens":7,"completion_tokens":4}}' % (
    b"y" * 500
)
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 01:23:07 GMT\r\nserver: uvicorn\r\n%scontent-length: %d\r\n"
    b"content-type: application/json\r\nvary: Origin\r\n\r\n%s"
)
REPORT = (
    b"endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=%d.0, named_metrics.kv_cache_usage_perc=0.%d\r\n"
)


class Nowhere(asyncio.Transport):
    """Takes bytes and forgets all but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.last = bytes(data)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass

    close = abort

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class DataPath:
    """A client's connection, two endpoints, and lbproxy between them."""

    def __init__(self, policy: str) -> None:
        urls = "\n".join(f"  - http://127.0.0.1:{port}" for port in (9, 10))
        settings = parse(f"routing: {{policy: {policy}}}\nendpoints:\n{urls}", environ={})
        rng = random.Random(1)
        balancer = Balancer(make_policy(settings.routing, rng), settings.balancing, rng=rng)
        self.runtime = runtime = Runtime(balancer)
        self.pool = ConnectionPool(runtime.pulse)
        specs = [EndpointSpec(name=one.name, base_url=one.url) for one in settings.endpoints]
        self.endpoints = runtime.set_endpoints(specs).added
        self.connections = []
        for endpoint in self.endpoints:
            runtime.report_models(endpoint.uid, [ModelCard("m", b'{"id":"m"}')])
            runtime.report_health(endpoint.uid, True, "")
            fresh = LoadMetrics(scraped_at=runtime.now() + 3600, waiting=0.0, running=0.0, kv_utilization=0.1)
            runtime.report_scrape(endpoint.uid, fresh)
            connection = Connection(self.pool, Origin.parse(endpoint.base_url))
            connection.connection_made(Nowhere())
            self.pool.keep(connection, idle=True)
            self.connections.append(connection)
        front = FrontEnd(settings, runtime, Exchanger(settings, runtime, self.pool), rng)
        self.client, self.transport = front(), Nowhere()
        self.client.connection_made(self.transport)

    def round(self, answers: Iterator[bytes], *, ask: bool) -> float:
        """CPU microseconds for one request."""
        for endpoint in self.endpoints:
            self.runtime.balancer.endpoints.ask_load(endpoint.uid, ask)
        began = time.process_time_ns()
        for answer in itertools.islice(answers, REQUESTS):
            self.client.data_received(REQUEST)
            for connection in self.connections:
                if connection._receiver is not None:
                    connection.data_received(answer)
        took_us = (time.process_time_ns() - began) / REQUESTS / 1000
        assert self.transport.last.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"endpoint-load" not in self.transport.last
        return took_us


async def measure(policy: str, rounds: int) -> None:
    path = DataPath(policy)
    plain = itertools.repeat(HEAD % (b"", len(ANSWER), ANSWER))
    reporting = (HEAD % (REPORT % (n % 3, n), len(ANSWER), ANSWER) for n in itertools.cycle(range(100_000)))
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        answers = list(itertools.islice(reporting, REQUESTS))  # made before the clock runs
        times[False].append(path.round(plain, ask=False))
        times[True].append(path.round(iter(answers), ask=True))
        await asyncio.sleep(0)
    path.pool.close()
    cells = [f"{statistics.median(took):.1f} ({min(took):.1f})" for took in times.values()]
    print(f"| {policy} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--policies", nargs="+", default=["least-request", "adaptive"])
    args = parser.parse_args()
    print("CPU time of a request in us, median of rounds (best round)\n")
    print("| policy | without a report | with one |\n|---|---|---|")
    for policy in args.policies:
        asyncio.run(measure(policy, args.rounds))


if __name__ == "__main__":
    main()
