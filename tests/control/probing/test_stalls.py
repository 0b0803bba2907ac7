# SPDX-License-Identifier: Apache-2.0
"""While we ourselves stand still, nobody is called late: not by the prober, the scraper or the log."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.health import HealthSettings
from lbproxy.core.endpoints.health import Health
from tests.control.rig import model_list, page, rig, running, spec
from tests.support.aio import run, until
from tests.support.endpoint import OK, ScriptedEndpoint, hang

LIMIT_S, STALL_S = 1.0, 1.3
"""The limit is long enough for a busy machine: of what it takes from us only standstills of 0.1 s are forgiven."""
HASTY = HealthSettings(interval=0.02, down_interval=0.02, timeout=LIMIT_S, fall=1)
HASTY_SCRAPE = ScrapeSettings(interval=0.01, timeout=LIMIT_S, stale_after=0.3)
METRICS = page(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n")


async def asked_more(server: ScriptedEndpoint) -> None:
    """Wait for a few more probes and scrapes."""
    before = len(server.requests)

    def enough() -> bool:
        paths = [one.path for one in server.requests[before:]]
        return min(paths.count("/health"), paths.count("/metrics")) > 3

    await until(enough)


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_probes_and_scrapes_that_we_slept_over_are_no_failures(plain: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One failed probe would be enough here to take it down."""

    async def main() -> None:
        scripts = {"/health": OK, "/v1/models": model_list("m"), "/metrics": METRICS}
        async with ScriptedEndpoint(dict(scripts)) as server, rig(spec(server), health=HASTY, scrape=HASTY_SCRAPE) as r:
            scraper = r.scraper(r.endpoints[0])
            async with running(r.prober(r.endpoints[0]).run, scraper.run):
                await until(lambda: r.seen().metrics is not None)
                for _ in range(2):
                    await asyncio.sleep(0)
                    time.sleep(STALL_S)  # noqa: ASYNC251 - the point
                    await asked_more(server)
            assert [move.after for move in r.records.transitions] == [Health.UP]
            assert set(scraper.status.results) == {"ok"}

    with caplog.at_level(logging.WARNING):
        run(main(), plain=plain)
    assert not [line for line in caplog.records if "lack" not in line.message]


def test_who_does_not_answer_is_found_all_the_same() -> None:
    """A process that stalls again and again must not keep a dead endpoint up for ever."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK}) as server,
            rig(spec(server), health=HASTY.model_copy(update={"timeout": 0.2})) as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: r.seen().health is Health.UP)
            server.scripts["/health"] = hang
            while r.seen().health is Health.UP:
                time.sleep(0.3)  # noqa: ASYNC251 - the point
                await asyncio.sleep(0.1)

    run(main())
