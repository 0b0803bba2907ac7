# SPDX-License-Identifier: Apache-2.0
"""The prober: who lives, and who serves what, against scripted servers on real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lbproxy.config.sections.health import HealthSettings
from lbproxy.control.probing.prober import LOADED_S, ask_health, ask_models
from lbproxy.core.endpoints.breaker import Cause
from lbproxy.core.endpoints.credentials import ApiKey, Tls
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.endpoints.health import Health
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.prompt_keys import hash_prompt
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.core.sleeping.servers import loads_on_demand
from lbproxy.net.connections.pool import Connection, ConnectionPool
from lbproxy.net.dialing.origin import Origin
from tests.control.rig import FAST_HEALTH, Rig, model_list, rig, running, spec
from tests.support.aio import run, until
from tests.support.certificates import CA, server_context
from tests.support.compiled import interpreted
from tests.support.endpoint import NOT_FOUND, OK, Script, ScriptedEndpoint, answer, hang, reset
from tests.support.garbage import left_by
from tests.support.pool import card

RECORDED = Path(__file__).parents[2] / "fixtures/http/vllm-0.32.0/models-two-names.response.http"
IMPATIENT = HealthSettings(interval=0.01, down_interval=0.01, timeout=0.05)
GARBAGE = b"SSH-2.0-OpenSSH_9.6\r\n"
TOO_LONG_A_LIST = answer(b'{"data":[{"id":"n"}]' + b" " * (4 << 20) + b"}")
PROBES_OF_A_NEIGHBOUR = 20
"""How long "never" is: until another endpoint was probed this often."""
PROMPT = b"a" * 40_000


def up(r: Rig, name: str = "e1") -> bool:
    return r.seen(name).health is Health.UP


def down(r: Rig, name: str = "e1") -> bool:
    return r.seen(name).health is Health.DOWN


@pytest.mark.parametrize(
    ("owner", "version", "engine", "found"),
    [
        ("library", answer(b'{"version":"0.14.0"}'), "auto", "ollama"),
        ("library", answer(b' {"version" : "0.14.0"}'), "auto", "ollama"),
        ("library", NOT_FOUND, "auto", None),
        ("library", answer(b"<html>"), "auto", None),
        ("library", reset, "auto", None),
        ("library", answer(b'{"version":"0.14.0"}'), "lmdeploy", None),
        ("vllm", answer(b'{"version":"0.14.0"}'), "auto", None),
    ],
)
def test_ollama_is_known_by_its_api(owner: str, version: Script, engine: str, found: str | None) -> None:
    """As its models do not name it: their owner is a name space. An engine that names itself is not asked."""

    async def main() -> None:
        listed = answer(b'{"data":[{"id":"a","owned_by":"%b"},{"id":"b"}]}' % owner.encode())
        async with ScriptedEndpoint({"/v1/models": listed, "/api/version": version}) as server, rig() as r:
            said = await ask_models(replace(spec(server), engine=engine), r.connections, 5.0)
            assert said.cards is not None
            assert [one.engine for one in said.cards] == [found, found]
            asked = any(one.path == "/api/version" for one in server.requests)
            assert asked == (owner == "library" and engine == "auto")

    run(main())


ROUTER = (
    b'{"data":[{"id":"a","owned_by":"llamacpp","status":{"value":"loaded"},"meta":{"n_ctx":8192}},'
    b'{"id":"b","owned_by":"llamacpp","status":{"value":"unloaded"}}]}'
)


@pytest.mark.parametrize("engine", ["auto", "llamacpp", "vllm"])
@pytest.mark.parametrize("owner", [b"llamacpp", b"vllm"])
def test_a_router_of_llama_cpp_is_known_by_its_list(engine: str, owner: bytes) -> None:
    """Without another question. Another engine that says the same of its models is none."""

    async def main() -> None:
        listed = answer(ROUTER.replace(b"llamacpp", owner))
        async with ScriptedEndpoint({"/v1/models": listed}) as server, rig() as r:
            said = await ask_models(replace(spec(server), engine=engine), r.connections, 5.0)
            assert said.cards is not None
            found = "llamacpp" if engine != "vllm" and owner == b"llamacpp" else None
            assert [one.engine for one in said.cards] == [found, found]
            assert [one.path for one in server.requests] == ["/v1/models"]

    run(main())


@pytest.mark.parametrize("engine", ["auto", "llamacpp"])
def test_models_in_memory_are_asked_for_while_an_endpoint_loads_them(engine: str) -> None:
    """And no longer, when another server has taken its address."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK, "/v1/models": answer(ROUTER)}) as server,
            rig(replace(spec(server), engine=engine)) as r,
            running(r.prober(r.endpoints[0]).run),
        ):

            def length(model: str) -> int | None:
                state = r.balancer.endpoints.get(r.endpoints[0].uid)
                cards = state.models if state is not None and state.models else {}
                return cards[model].context_tokens if model in cards else None

            await until(lambda: r.in_memory() == ["a"])
            await until(lambda: length("a") == 8192)
            assert length("b") is None
            states = ROUTER.replace(b'"loaded"', b'"unloaded"').replace(b'"unloaded"}}]}', b'"loaded"}}]}')
            server.scripts["/v1/models"] = answer(states)
            await until(lambda: r.in_memory() == ["b"])
            server.scripts["/v1/models"] = answer(b'{"data":[{"id":"a","owned_by":"llamacpp"}]}')
            r.runtime.doubt_models(r.endpoints[0].uid)
            state = r.balancer.endpoints.get(r.endpoints[0].uid)
            assert state is not None
            await until(lambda: not loads_on_demand(state))

            def asked(path: str) -> int:
                return [one.path for one in server.requests].count(path)

            before, probes = asked("/v1/models"), 2 * LOADED_S / FAST_HEALTH.interval
            end = asked("/health") + probes
            await until(lambda: asked("/health") > end)
            assert asked("/v1/models") == before

    run(main())


@pytest.mark.parametrize("owner", [b"llamacpp", b"vllm"])
def test_a_router_whose_models_the_settings_say_is_asked_for_those_in_memory(owner: bytes) -> None:
    """By any of a model's names. One that loads nothing on demand is asked for its list alone."""

    async def main() -> None:
        said = ROUTER.replace(b'"id":"a"', b'"id":"org/a:Q4","aliases":["a"]').replace(b"llamacpp", owner)
        async with ScriptedEndpoint({"/health": OK, "/v1/models": answer(said)}) as server:
            router = replace(spec(server), models=("a", "b"), engine="llamacpp")
            async with rig(router) as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: up(r) and server.asked("/v1/models"))
                if owner == b"vllm":
                    await until(lambda: server.asked("/health") > PROBES_OF_A_NEIGHBOUR)
                    assert not r.balancer.snapshot(now=r.runtime.now()).in_memory
                else:
                    await until(lambda: r.in_memory() == ["a"])
                assert r.seen().models == ("a", "b")

    run(main())


STUDIO = {
    "/v1/models": answer(b'{"data":[{"id":"a","object":"model","owned_by":"organization_owner"}],"object":"list"}'),
    "/api/v1/models": answer(b'{"error":"Unexpected endpoint or method. (GET /api/v1/models)"}'),
    "/api/v0/models": answer(b'{"data":[{"id":"a","state":"loaded","loaded_context_length":4096}]}'),
}


@pytest.mark.parametrize("engine", ["auto", "lmstudio"])
def test_an_old_lm_studio_is_asked_where_it_says_it(engine: str) -> None:
    """A newer path is tried once, not each second."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK, **STUDIO}) as server,
            rig(replace(spec(server), engine=engine)) as r,
            running(r.prober(r.endpoints[0]).run),
        ):

            def asked(path: str) -> int:
                return [one.path for one in server.requests].count(path)

            await until(lambda: asked("/api/v0/models") > 2)
            assert asked("/api/v1/models") <= 2  # to recognise it, and the first time
            assert r.in_memory() == ["a"]

    run(main())


@pytest.mark.parametrize("owner", [b"organization_owner", b"vllm", b"lmstudio"])
def test_servers_that_are_no_lm_studio_are_not_asked_as_one(owner: bytes) -> None:
    """But once for a list of models that looks like one."""

    async def main() -> None:
        listed = answer(b'{"data":[{"id":"a","owned_by":"%b"}]}' % owner)
        async with ScriptedEndpoint({"/v1/models": listed}) as server, rig() as r:
            said = await ask_models(spec(server), r.connections, 5.0)
            assert said.cards is not None
            assert said.cards[0].engine is None
            asked = [one.path for one in server.requests if one.path in STUDIO]
            assert asked == [*STUDIO] if owner == b"organization_owner" else ["/v1/models"]

    run(main())


def test_models_are_known_before_the_endpoint_is_up() -> None:
    """Else the first requests would be placed on endpoints that do not serve their model."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK, "/v1/models": RECORDED.read_bytes()}) as server,
            rig(spec(server)) as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: up(r))
            assert r.records.models_then == [("tiny", "tiny-alias")]
            assert r.records.transitions[0].reason == "GET /health returned 200"

    run(main())


@pytest.mark.parametrize("status", [204, 301, 401, 404, 429])
def test_any_answer_below_500_is_alive(status: int) -> None:
    """A server behind a key, or without a health path, works all the same."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": answer(b"", status=status)}) as server,
            rig(spec(server)) as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: up(r))

    run(main())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (answer(status=500), "returned 500"),
        (answer(status=503), "returned 503"),
        (GARBAGE, "not HTTP/1.x"),
        (hang, "no response within 0.05 s"),
        (reset, ""),
        (answer(b"x" * (65 << 10)), "too large"),
    ],
    ids=["500", "503", "garbage", "hang", "reset", "too large"],
)
def test_what_is_no_answer_takes_an_endpoint_down(script: Script, reason: str) -> None:
    """The first of all judges at once; an endpoint that was up falls after `fall`."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK}) as server,
            rig(spec(server), health=IMPATIENT if script is hang else FAST_HEALTH) as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: up(r))
            server.scripts["/health"] = script
            await until(lambda: down(r))
            assert reason in r.records.transitions[-1].reason

    run(main())


def compute_prompt(r: Rig) -> float:
    """Have the endpoint compute PROMPT; returns how many of its tokens were predicted in the prefix cache before."""
    request = InferenceRequest("r", "m", True, len(PROMPT), len(PROMPT), hash_prompt(PROMPT, model="m"))
    now = r.runtime.now()
    ticket = r.balancer.submit(request, now=now)
    assert ticket.placement is not None
    predicted = ticket.placement.cached_tokens
    r.balancer.first_byte(ticket, now=now)
    r.balancer.close(ticket, Outcome.COMPLETED, now=now)
    return predicted


@pytest.mark.parametrize("restarts", [True, False])
def test_a_server_without_metrics_that_stops_and_starts_again_is_predicted_an_empty_prefix_cache(
    restarts: bool,
) -> None:
    """Only the refused connections of its probes show that it is another process; a 503 does not."""

    async def main() -> None:
        server = ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m")})
        async with server:
            pass
        async with rig(spec(server, metrics=None), policy="adaptive") as r, running(r.prober(r.endpoints[0]).run):
            async with server:
                await until(lambda: up(r))
                assert compute_prompt(r) == 0.0
                assert compute_prompt(r) > 9000.0
                if not restarts:
                    server.scripts["/health"] = answer(status=503)
                    await until(lambda: down(r))
                    server.scripts["/health"] = OK
                    await until(lambda: up(r))
                    assert compute_prompt(r) > 9000.0
                    return
            await until(lambda: down(r))
            async with server:
                await until(lambda: up(r))
                assert compute_prompt(r) == 0.0

    run(main())


def test_only_a_refused_connection_means_that_nothing_listens() -> None:
    """Whatever else fails may be a server that is slow or in trouble, and keeps its caches."""

    async def main() -> None:
        async with ScriptedEndpoint({"/reset": reset, "/hang": hang, "/503": answer(status=503)}) as server, rig() as r:
            for path in ("/reset", "/hang", "/503"):
                health = await ask_health(spec(server), path, r.connections, 0.2)
                assert (health.ok, health.refused) == (False, False), path
        async with rig() as r:
            health = await ask_health(spec(server), "/health", r.connections, 5.0)
            assert (health.ok, health.refused) == (False, True)

    run(main())


def test_nobody_listening_is_down_and_is_found_when_it_comes() -> None:
    """With an interval of an hour while up: an endpoint that is down is asked at its own, shorter one."""

    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m")}) as server:
            pass
        health = FAST_HEALTH.model_copy(update={"interval": 3600.0})
        async with rig(spec(server), health=health) as r, running(r.prober(r.endpoints[0]).run):
            await until(lambda: down(r))
            async with server:
                await until(lambda: up(r))
            assert r.records.models_then[-1] == ("m",)

    run(main())


def test_an_endpoint_that_hangs_slows_no_other() -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/health": hang}) as slow, ScriptedEndpoint({"/health": OK}) as good:
            health = FAST_HEALTH.model_copy(update={"timeout": 3600.0})
            specs = spec(slow, "slow"), spec(good, "good")
            async with rig(*specs, health=health) as r, running(*(r.prober(one).run for one in r.endpoints)):
                await until(lambda: good.asked("/health") >= PROBES_OF_A_NEIGHBOUR)
                assert up(r, "good")
                assert r.seen("slow").health is Health.STARTING
                assert slow.asked("/health") == 1

    run(main())


@pytest.mark.parametrize(
    "script",
    [
        *(answer(status=500), answer(status=429), answer(status=401), answer(status=403)),
        *(answer(b"<html>", kind="text/html"), GARBAGE, hang, TOO_LONG_A_LIST),
    ],
    ids=["500", "429", "401", "403", "html", "garbage", "hang", "too large"],
)
def test_a_failed_question_for_models_changes_nothing(script: Script) -> None:
    """Forgetting them would send an endpoint's requests elsewhere because of one bad moment."""

    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m")}) as server:
            health = IMPATIENT.model_copy(update={"models_interval": 0.02, "timeout": 0.5})
            async with rig(spec(server), health=health) as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: up(r))
                server.scripts["/v1/models"] = script
                before = server.asked("/v1/models")
                await until(lambda: server.asked("/v1/models") >= before + 3)
                assert r.seen().models == ("m",)
                assert up(r)
                server.scripts["/v1/models"] = model_list("n", "m")
                await until(lambda: r.seen().models == ("n", "m"))

    run(main())


@pytest.mark.parametrize("script", [NOT_FOUND, answer(status=307)], ids=["404", "307"])
def test_an_endpoint_without_a_list_is_up_and_says_nothing(script: Script) -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m")}) as server:
            health = FAST_HEALTH.model_copy(update={"models_interval": 0.02})
            async with rig(spec(server), health=health) as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: r.seen().models == ("m",))
                server.scripts["/v1/models"] = script
                await until(lambda: r.seen().models is None)
                assert up(r)

    run(main())


def test_an_endpoint_that_fails_to_list_its_models_is_up_all_the_same() -> None:
    """The Balancer treats it as a last resort; and it is asked again in the very next cycle."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK, "/v1/models": answer(status=500)}) as server,
            rig(spec(server)) as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: up(r) and server.asked("/v1/models") >= 5)
            assert r.seen().models is None
            server.scripts["/v1/models"] = model_list("m")
            await until(lambda: r.seen().models == ("m",))

    run(main())


def test_models_that_are_known_are_not_asked_for_every_time() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m")}) as server,
            rig(spec(server)) as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: server.asked("/health") >= PROBES_OF_A_NEIGHBOUR)
            assert server.asked("/v1/models") == 1

    run(main())


def test_an_endpoint_that_returns_is_asked_for_its_models_first() -> None:
    """It may have been restarted with another model."""

    async def main() -> None:
        async with (
            ScriptedEndpoint({"/health": OK, "/v1/models": model_list("old")}) as server,
            rig(spec(server)) as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: up(r))
            server.scripts["/health"] = answer(status=503)
            await until(lambda: down(r))
            assert r.seen().models == ("old",)
            server.scripts["/v1/models"] = model_list("new")
            server.scripts["/health"] = OK
            await until(lambda: up(r))
            assert r.records.models_then[-1] == ("new",)

    run(main())


def test_a_stop_in_the_turn_in_which_its_models_are_doubted_is_a_stop() -> None:
    """Python 3.11's `wait_for` lost that cancellation, and the loop went on for ever."""

    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m")}) as server:
            health = FAST_HEALTH.model_copy(update={"interval": 3600.0})
            async with rig(spec(server), health=health) as r:
                prober = r.prober(r.endpoints[0])
                task = asyncio.create_task(prober._keep_models())
                await asyncio.sleep(0.05)
                prober.doubt_models()
                await asyncio.sleep(0)  # what waits for the doubt is done, and its task is not told yet
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=15.0)
                task.cancel()
                assert done == {task}

    run(main())


def test_a_slow_model_list_does_not_delay_the_verdict_on_an_endpoint_that_is_up() -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m")}) as server:
            health = FAST_HEALTH.model_copy(update={"models_interval": 0.02, "timeout": 3600.0, "fall": 1})
            async with rig(spec(server), health=health) as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: up(r))
                server.scripts["/v1/models"] = hang
                asked = server.asked("/v1/models")
                await until(lambda: server.asked("/v1/models") > asked)
                server.scripts["/health"] = answer(status=503)
                await until(lambda: down(r))

    run(main())


def test_a_passive_endpoint_gets_no_health_requests() -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/v1/models": model_list("m")}) as server:
            health = FAST_HEALTH.model_copy(update={"models_interval": 0.01})
            async with rig(spec(server, health=None), health=health) as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: server.asked("/v1/models") >= 5)
                assert r.seen().models == ("m",)
                assert {one.path for one in server.requests} == {"/v1/models"}

    run(main())


def test_a_change_of_models_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("a", "b")}) as server:
            health = FAST_HEALTH.model_copy(update={"models_interval": 0.01})
            async with rig(spec(server), health=health) as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: server.asked("/v1/models") >= 5)
                server.scripts["/v1/models"] = model_list("b", "a")
                asked = server.asked("/v1/models")
                await until(lambda: server.asked("/v1/models") >= asked + 3)
                server.scripts["/v1/models"] = NOT_FOUND
                await until(lambda: r.seen().models is None)

    caplog.set_level("INFO", "lbproxy")
    run(main())
    assert caplog.messages == [
        "e1 serves a, b",
        "the models of e1 cannot be read any more: GET /v1/models returned 404",
    ]


class ExhaustedPool(ConnectionPool):
    async def connect(self, origin: Origin, timeout_s: float) -> Connection:
        raise UpstreamError(FailureKind.EXHAUSTED, "too many open files")


@interpreted
def test_our_own_lack_of_descriptors_is_no_verdict() -> None:
    """Else one overload of ours would take the whole fleet down."""

    async def main() -> None:
        pool = ExhaustedPool()
        endpoint = EndpointSpec(name="e1", base_url="http://127.0.0.1:1")
        assert (await ask_health(endpoint, "/health", pool, 1.0)).ok is None
        assert not (await ask_models(endpoint, pool, 1.0)).valid
        pool.close()

    run(main())


def test_an_endpoint_whose_models_are_said_is_not_asked() -> None:
    """Nor believed, if an answer from before comes late."""

    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": RECORDED.read_bytes()}) as server:
            said = replace(spec(server), models=("a", "b"))
            async with rig(said) as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: up(r) and server.asked("/health") > PROBES_OF_A_NEIGHBOUR)
                assert r.records.models_then == [("a", "b")]
                assert not server.asked("/v1/models")
                r.runtime.report_models(r.endpoints[0].uid, [card("tiny")])
                assert r.seen().models == ("a", "b")
                r.runtime.set_endpoints([spec(server)])
                assert r.seen().models is None, "from now on it is asked"

    run(main())


def test_probes_show_the_key_over_tls() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(
            {"/health": OK, "/v1/models": RECORDED.read_bytes()}, tls=server_context()
        ) as server:
            keyed = replace(spec(server), api_key=ApiKey("sk-1"), tls=Tls(CA.read_text()))
            async with rig(keyed) as r, running(r.prober(r.endpoints[0]).run):
                await until(lambda: up(r))
            assert {one.path for one in server.requests} == {"/health", "/v1/models"}
            assert {one.field("authorization") for one in server.requests} == {"Bearer sk-1"}

    run(main())


def test_one_that_comes_back_from_an_ejection_is_asked_for_its_models_at_once() -> None:
    async def main() -> None:
        slow = HealthSettings(interval=0.01, models_interval=3600.0, timeout=5.0)
        async with (
            ScriptedEndpoint({"/health": OK, "/v1/models": model_list("a")}) as server,
            rig(spec(server), health=slow) as r,
            running(r.prober(r.endpoints[0]).run),
        ):
            await until(lambda: up(r))
            server.scripts["/v1/models"] = model_list("b")
            state = r.balancer._endpoints.get(r.endpoints[0].uid)
            assert state is not None
            r.balancer._judge._eject(state, Cause.FAULTS, "test", r.runtime.now())
            assert [card.id for card in r.runtime.serving.model_cards()] == ["a"]
            state.standing.breaker.until = r.runtime.now()
            r.balancer._judge.due_at = r.runtime.now()
            r.runtime.check()
            await until(lambda: [card.id for card in r.runtime.serving.model_cards()] == ["b"])

    run(main())


def test_an_endpoint_that_left_the_set_before_its_prober_began_is_no_error() -> None:
    """Tasks begin a turn of the loop after they are made, and a thousand endpoints that leave end in later turns."""

    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("n")}) as server, rig(spec(server)) as r:
            prober = r.prober(r.endpoints[0])
            r.runtime.set_endpoints([])
            async with running(prober.run):
                await until(lambda: [one.path for one in server.requests].count("/health") >= 3)
            assert r.snapshots() == []

    run(main())


def test_a_prober_that_is_cancelled_leaves_nothing_to_the_garbage_collector() -> None:
    """A thousand may end together, when a name loses its addresses."""

    async def main() -> None:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m")}) as server, rig(spec(server)) as r:

            async def begin_and_end() -> None:
                task = asyncio.create_task(r.prober(r.endpoints[0]).run())
                await asyncio.sleep(0)
                await asyncio.sleep(0)  # its loops have begun
                task.cancel()
                await asyncio.wait([task])

            assert await left_by(begin_and_end) == 0

    run(main())
