# SPDX-License-Identifier: Apache-2.0
"""The prober asks engines without metrics how much their cache holds: when, whom, and what it does not cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lbproxy.core.caches.cache_size import GUESSED_TOKENS
from lbproxy.core.endpoints.credentials import ApiKey
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.endpoints.health import Health
from tests.control.rig import FAST_HEALTH, Rig, model_list, page, rig, running, spec
from tests.support.aio import run, until
from tests.support.endpoint import NOT_FOUND, OK, Script, ScriptedEndpoint, answer, hang, reset
from tests.support.pool import answer_unfound, believed_size

FIXTURES = Path(__file__).parents[2] / "fixtures"
SERVERS = {"sglang": ("sglang-0.5.23", "get_server_info"), "llamacpp": ("llama.cpp-b11434", "props")}
SIZES = {"sglang": 4096, "llamacpp": 2048}
NEW, OLD, PROPS = "/server_info", "/get_server_info", "/props"
PATHS = {NEW, OLD, PROPS}
OFTEN = FAST_HEALTH.model_copy(update={"models_interval": 0.01})
IMPATIENT = OFTEN.model_copy(update={"timeout": 0.5})


def recorded(engine: str, name: str) -> bytes:
    """A whole answer with the body of a recorded one, on a connection that stays open."""
    server = SERVERS[engine][0]
    return answer((FIXTURES / f"http/{server}/{name}.response.http").read_bytes().partition(b"\r\n\r\n")[2])


def sglang(size: Script, *, models: bytes | None = None) -> dict[str, Script]:
    return {"/health": OK, "/v1/models": models or recorded("sglang", "models"), NEW: size}


def says(tokens: int) -> bytes:
    return answer(b'{"max_total_num_tokens":%d}' % tokens)


def asked(server: ScriptedEndpoint) -> int:
    """How often about its cache."""
    return sum(server.asked(path) for path in PATHS)


def size(r: Rig) -> float | None:
    return believed_size(r.balancer, r.endpoints[0])


def health(r: Rig) -> Health:
    return r.seen().health


@pytest.mark.parametrize("path", [NEW, OLD, PROPS])
@pytest.mark.parametrize("engine", ["auto", "said"])
def test_the_size_is_known_before_the_endpoint_is_up(path: str, engine: str) -> None:
    """So that the first request is placed by it. SGLang: by either name of the page, for old versions and new ones."""
    name = "llamacpp" if path == PROPS else "sglang"
    scripts: dict[str, Script] = {"/health": OK, "/v1/models": recorded(name, "models")}
    scripts[path] = recorded(name, SERVERS[name][1])

    async def main() -> None:
        async with ScriptedEndpoint(scripts) as server:
            one = spec(server, engine="auto" if engine == "auto" else name)
            async with rig(one, policy="adaptive") as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: health(r) is Health.UP)
                assert r.records.sizes_then == [SIZES[name]]

    run(main())


NO_SIZES: dict[str, Script] = {
    "404": NOT_FOUND,
    "401": answer(status=401),
    "500": answer(status=500),
    "html": answer(b"<html>", kind="text/html"),
    "0": says(0),
    "too large": answer(b" " * (2 << 20) + b'{"max_total_num_tokens":7}'),
    "garbage": b"SSH-2.0-OpenSSH_9.6\r\n",
    "hang": hang,
    "reset": reset,
}


@pytest.mark.parametrize("script", NO_SIZES.values(), ids=NO_SIZES)
def test_an_endpoint_that_does_not_say_it_is_up_all_the_same(script: Script) -> None:
    """It serves its models, its cache's size is guessed, and it is asked again now and then."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(sglang(script)) as server,
            rig(spec(server), health=IMPATIENT, policy="adaptive") as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: health(r) is Health.UP)
            assert r.records.models_then == [("tiny",)]
            assert r.records.sizes_then == [GUESSED_TOKENS]
            before = asked(server)
            await until(lambda: asked(server) >= before + 3)
            assert health(r) is Health.UP
            server.scripts[NEW] = says(99_000)
            await until(lambda: size(r) == 99_000)

    run(main())


def test_what_it_said_last_holds_until_it_says_something_else() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(sglang(says(99_000))) as server,
            rig(spec(server), health=OFTEN, policy="adaptive") as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: size(r) == 99_000)
            server.scripts[NEW] = answer(status=500)
            before = asked(server)
            await until(lambda: asked(server) >= before + 3)
            assert size(r) == 99_000
            server.scripts[NEW] = says(55_000)
            await until(lambda: size(r) == 55_000)

    run(main())


def test_a_server_that_comes_back_with_another_size_is_asked_before_it_is_up() -> None:
    """Restarted with other flags, or on another GPU. At the usual interval it would be asked half a minute later."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(sglang(says(99_000))) as server,
            rig(spec(server), policy="adaptive") as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: health(r) is Health.UP)
            server.scripts["/health"] = answer(status=503)
            await until(lambda: health(r) is Health.DOWN)
            server.scripts |= {"/health": OK, NEW: says(55_000)}
            await until(lambda: health(r) is Health.UP)
            assert r.records.sizes_then == [99_000, 99_000, 55_000]

    run(main())


def test_a_size_that_is_known_is_not_asked_for_every_time() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(sglang(says(99_000))) as server,
            rig(spec(server), policy="adaptive") as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: server.asked("/health") >= 20)
            assert asked(server) == 1

    run(main())


@pytest.mark.parametrize("health_path", ["/health", None])
@pytest.mark.parametrize("models", [None, ("m",)])
def test_it_needs_neither_probes_nor_a_list_of_models(health_path: str | None, models: tuple[str, ...] | None) -> None:
    """Where the settings say which engine it is; and by the list of models alone without them."""
    engine = "auto" if models is None else "sglang"

    async def main() -> None:
        async with ScriptedEndpoint(sglang(says(99_000))) as server:
            one = replace(spec(server, health=health_path, engine=engine), models=models)
            async with rig(one, policy="adaptive") as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: size(r) == 99_000)
                assert server.asked("/health") == 0 or health_path is not None
                assert server.asked("/v1/models") == 0 or models is None

    run(main())


@pytest.mark.parametrize(
    ("change", "models"),
    [
        ({"engine": "vllm"}, recorded("sglang", "models")),
        ({"engine": "trtllm-serve"}, recorded("sglang", "models")),
        ({"models": ("m",)}, recorded("sglang", "models")),
        ({}, model_list("m")),
        ({}, answer(b'{"data":[{"id":"m","owned_by":"vllm"}]}')),
        ({}, NOT_FOUND),
    ],
    ids=["vllm", "trtllm", "models in the settings", "nobody's", "vllm's", "no list"],
)
def test_who_is_not_asked(change: dict[str, object], models: bytes) -> None:
    """Whoever is not known to be an engine that describes itself: no path is just tried."""

    async def main() -> None:
        async with ScriptedEndpoint(sglang(says(99_000), models=models)) as server:
            one: EndpointSpec = replace(spec(server), **change)  # type: ignore[arg-type]
            async with rig(one, health=OFTEN, policy="adaptive") as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: server.asked("/health") >= 20)
                assert health(r) is Health.UP
                assert asked(server) == 0
                assert size(r) == GUESSED_TOKENS

    run(main())


def test_of_an_endpoint_whose_size_the_settings_say_the_slots_are_asked_all_the_same() -> None:
    page = b'{"max_total_num_tokens":99000,"internal_states":[{"effective_max_running_requests_per_dp":48}]}'

    async def main() -> None:
        async with ScriptedEndpoint(sglang(answer(page))) as server:
            one = replace(spec(server), kv_cache_tokens=77_000)
            async with rig(one, health=OFTEN, policy="adaptive") as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: asked(server) >= 1 and health(r) is Health.UP)
                learned = r.balancer.learned(now=r.runtime.now())
                assert learned is not None
                assert learned[1][r.endpoints[0].uid].limit == 48
                assert size(r) == 77_000

    run(main())


def test_the_question_shows_the_endpoints_own_key() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(sglang(says(99_000))) as server:
            keyed = replace(spec(server), api_key=ApiKey("sk-1"))
            async with rig(keyed, policy="adaptive") as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: size(r) == 99_000)
            assert {one.field("authorization") for one in server.requests if one.path == NEW} == {"Bearer sk-1"}

    run(main())


def test_metrics_are_read_oftener_and_so_count_more() -> None:
    """Both say the same of a real SGLang: pages times their size."""
    metrics = (FIXTURES / "metrics/sglang-0.5.23-load.prom").read_bytes()

    async def main() -> None:
        async with ScriptedEndpoint(sglang(says(99_000)) | {"/metrics": page(metrics)}) as server:
            one = spec(server, engine="sglang")
            async with rig(one, policy="adaptive") as r:
                loops = (r.prober(r.endpoints[0]).run, r.scraper(r.endpoints[0]).run)
                async with running(*loops):
                    await until(lambda: size(r) == 4096)
                    assert r.records.sizes_then == [99_000]

    run(main())


def test_a_policy_that_does_not_care_is_not_disturbed() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(sglang(says(99_000))) as server,
            rig(spec(server), policy="least-request") as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: health(r) is Health.UP)
            assert r.records.sizes_then == [None]

    run(main())


@pytest.mark.parametrize("engine", SIZES)
def test_an_upper_bound_is_taken_for_one(engine: str) -> None:
    """llama.cpp's: what its answers say of their prompts teaches more. SGLang's size is exact."""
    name = SERVERS[engine][1]
    page, models = recorded(engine, name), recorded(engine, "models")
    large = page.replace(b'"n_ctx":1024', b'"n_ctx":262144').replace(b'num_tokens":4096', b'num_tokens":524288')
    large = answer(large.partition(b"\r\n\r\n")[2])

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK, "/v1/models": models, f"/{name}": large}) as server,
            rig(spec(server), policy="adaptive") as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: health(r) is Health.UP)
            assert r.records.sizes_then == [524_288]
            answer_unfound(r.balancer, "tiny")
            assert (size(r) == 524_288) is (engine == "sglang")

    run(main())
