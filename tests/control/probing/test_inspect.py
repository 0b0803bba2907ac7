# SPDX-License-Identifier: Apache-2.0
"""`lbproxy check` asks an endpoint everything once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.health import HealthSettings
from lbproxy.control.probing.inspect import Inspection, inspect
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.engines.dialects import SIGNALS, Engines
from lbproxy.net.connections.pool import ConnectionPool
from tests.control.rig import model_list, page
from tests.support.aio import run
from tests.support.endpoint import NOT_FOUND, OK, ScriptedEndpoint, answer, hang

PAGE = (Path(__file__).parents[2] / "fixtures/metrics/vllm-0.32.0-idle-after-requests.prom").read_bytes()


async def inspected(server: ScriptedEndpoint, **differs: str | None) -> Inspection:
    pool = ConnectionPool()
    try:
        endpoint = EndpointSpec(name="e1", base_url=server.url, **differs)  # type: ignore[arg-type]
        return await inspect(endpoint, pool, HealthSettings(timeout=5.0), ScrapeSettings(timeout=5.0), Engines())
    finally:
        pool.close()


def test_a_good_server_shows_everything() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(
            {
                "/health": OK,
                "/v1/models": model_list("base", "sql-lora", "chat-lora", parent="base"),
                "/metrics": page(PAGE),
            }
        ) as server:
            found = await inspected(server)
            assert found.usable
            assert found.shown.engine == "vllm"
            assert found.models == ("base",)
            assert found.adapters == {"base": ("sql-lora", "chat-lora")}
            assert found.shown.present == SIGNALS
            assert found.shown.missing == ()
            assert found.problems == ()

    run(main())


def test_nobody_there_is_told_for_each_question() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as server:
            pass
        found = await inspected(server)
        assert not found.reachable
        assert not found.usable
        assert found.healthy is False
        assert len(found.problems) == 3
        assert found.models is None

    run(main())


def test_a_sick_server_is_reachable_but_not_usable() -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/health": answer(status=503)}) as server:
            found = await inspected(server)
            assert found.reachable
            assert not found.usable
            assert found.problems[0] == "GET /health returned 503"

    run(main())


def test_missing_signals_are_named() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(
            {"/health": OK, "/v1/models": model_list("m"), "/metrics": page(b"vllm:num_requests_running 1\n")}
        ) as server:
            found = await inspected(server)
            assert found.shown.present == ("running",)
            assert found.shown.missing == tuple(name for name in SIGNALS if name != "running")
            assert found.usable

    run(main())


def test_a_page_that_is_of_no_engine_is_a_problem_but_not_fatal() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(
            {"/health": OK, "/v1/models": model_list("m"), "/metrics": page(b"up 1\n")}
        ) as server:
            found = await inspected(server)
            assert found.problems == ("load unknown: no known engine's metrics are on the page",)
            assert found.usable
            fixed = await inspected(server, engine="vllm")
            assert fixed.problems == ("load unknown: none of vllm's metrics is on the page",)
            assert fixed.shown.missing == SIGNALS

    run(main())


def test_a_passive_endpoint_is_usable_if_it_answers_anything() -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/health": hang, "/v1/models": NOT_FOUND}) as server:
            found = await inspected(server, health=None, metrics=None)
            assert server.asked("/health") == 0
            assert found.healthy is None
            assert found.health == "not asked"
            assert found.usable
            assert found.problems == ("models unknown: GET /v1/models returned 404",)

    run(main())


RECORDED = Path(__file__).parents[2] / "fixtures/http"


@pytest.mark.parametrize(
    ("server", "path", "name", "said", "owner"),
    [
        ("sglang-0.5.23", "/get_server_info", "get_server_info", (4096, False, 2048), "sglang"),
        ("llama.cpp-b11434", "/props", "props", (2048, True, 2), "llamacpp"),
    ],
)
def test_what_a_server_says_of_itself(
    server: str, path: str, name: str, said: tuple[int, bool, int], owner: str
) -> None:
    """As these servers answered when they were recorded."""

    async def main() -> None:
        models, page = ((RECORDED / server / f"{one}.response.http").read_bytes() for one in ("models", name))
        async with ScriptedEndpoint({"/health": OK, "/v1/models": models, path: page}) as endpoint:
            found = await inspected(endpoint)
            assert found.said is not None
            assert (found.said[:3], found.owner) == (said, owner)
            assert (await inspected(endpoint, engine="vllm")).said is None

    run(main())
