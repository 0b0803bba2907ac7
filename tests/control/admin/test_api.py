# SPDX-License-Identifier: Apache-2.0
"""The admin API's handlers: what they refuse, what they survive, and what a viewer costs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf
from typing import Any, get_args

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from lbproxy.config.parse import parse, without_secrets
from lbproxy.config.sections.access import Secret
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.control.admin import api as api_module
from lbproxy.control.admin import connections
from lbproxy.control.admin.api import Api
from lbproxy.control.admin.changes import ReloadResult
from lbproxy.control.admin.server import Admin
from lbproxy.control.admin.state import ShownState
from lbproxy.control.discovery.overlay import Lease, Overlay, UnknownEntryError
from lbproxy.control.families.common import Loads, RequestTotals
from lbproxy.control.families.requests import FIRST_BYTE_BUCKETS
from lbproxy.control.telemetry.history import STEPS, History, quantile_ms
from lbproxy.control.telemetry.recent import FULL, MAX_TRANSITIONS, REFUSED, WAITS, Recent
from lbproxy.core.endpoints import endpoint_set
from lbproxy.core.endpoints.endpoint import Endpoint, EndpointSpec, EndpointUid
from lbproxy.core.endpoints.health import Health, Transition
from lbproxy.core.endpoints.state import EndpointSnapshot, EndpointState, snapshot_of
from lbproxy.core.observed.learned import FULL_BY
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.ticket import TicketState, Wait
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.driver.runtime import Runtime
from lbproxy.net.listening import deadlines
from tests.control.rig import ADMIN_TOKEN, BEARER, Rig, admin_site, rig
from tests.support.aio import run, until
from tests.support.pool import submit

JSON = {"content-type": "application/json"}
SETTINGS = "endpoints: [{url: http://10.0.0.1:8000, name: e1}, {url: http://10.0.0.2:8000, name: e2}]"


class FakeFront:
    url: str | None = "http://127.0.0.1:8080"
    draining = False
    running = 0
    open_connections = 0

    def running_records(self) -> list[RequestRecord]:
        return []


class FakePages:
    async def page(self) -> tuple[bytes, str]:
        return b"", "text/plain"


class FakeSteering:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.settings = parse(SETTINGS, environ={})
        self.reloads: ReloadResult | None = ReloadResult([], ["routing.policy: random, was adaptive"], ["listen"])
        self.asleep_problem: str | None = None
        self.awake: list[bool] = []
        self.added: list[tuple[Mapping[str, object], bool]] = []
        self.overlay = Overlay()
        self.now = 0.0

    async def reload(self) -> ReloadResult | None:
        return self.reloads

    async def usage(self, days: int, *, own: bool) -> dict[str, object]:
        counts = {"prompt_uncached": 1, "prompt_cached": 2, "completion": 3, "estimated": days}
        return {
            "kept": not own,
            "all_replicas": not own,
            "rows": [{"day": "2026-11-29", "flow": "f", "model": None} | counts],
        }

    async def add_endpoint(self, entry: Mapping[str, object], *, keep: bool) -> str:
        _, changed = Overlay().add(self.settings, entry, keep=keep)
        self.added.append((entry, keep))
        return changed.endpoints[-1].name

    async def register_endpoint(self, entry: Mapping[str, object], *, ttl_s: float) -> tuple[str, bool]:
        if (name := self.overlay.renew(self.settings, entry, ttl_s, self.now)) is not None:
            return name, False
        lease = Lease.begin(ttl_s, self.now)
        self.overlay, self.settings, is_new = self.overlay.register(self.settings, entry, lease)
        return self.settings.endpoints[-1].name, is_new

    async def remove_endpoint(self, name: str, *, registered_by: str | None = None) -> bool:
        if registered_by is not None:
            self.overlay.check_registered(self.settings, name, registered_by)
        Overlay().remove(self.settings, name)
        return True

    def set_log_level(self, level: str) -> None:
        log = self.settings.log.model_copy(update={"level": level})
        self.settings = self.settings.model_copy(update={"log": log})

    def drain(self, uid: EndpointUid, *, draining: bool, move_after_s: float = inf) -> None:
        self.runtime.drain(uid, draining=draining, move_after_s=move_after_s)

    def set_awake(self, uid: int, awake: bool) -> str | None:
        self.awake.append(awake)
        return self.asleep_problem

    def origin(self, name: str) -> str:
        return "settings"


class Site:
    def __init__(self, pool: Rig) -> None:
        self.rig = pool
        self.front = FakeFront()
        self.steering = FakeSteering(pool.runtime)
        self.recent = Recent(100, pool.runtime.now, self.front.running_records)
        loads = Loads()
        state = ShownState(
            pool.runtime,
            self.front,
            self.recent,
            settings=lambda: self.steering.settings,
            origin=self.steering.origin,
            loads=loads,
        )
        every = pool.balancer.endpoints.every
        history = History(lambda: RequestTotals([0] * 12, 0), every, lambda: pool.balancer.queue(now=0.0))
        self.api = Api(pool.runtime, state, history, self.steering)
        self.admin = Admin(pool.runtime, self.front, FakePages(), None, self.api)


@asynccontextmanager
async def site() -> AsyncIterator[tuple[Site, httpx.AsyncClient]]:
    """Its client has the token."""
    async with admin_site(Site) as (made, client):
        client.headers.update(BEARER)
        yield made, client


def code(answer: httpx.Response) -> tuple[int, str]:
    found = answer.json()["error"]["code"]
    assert answer.headers["x-lbproxy-reason"] == found
    return answer.status_code, found


def test_a_page_from_elsewhere_cannot_have_a_browser_change_anything() -> None:
    """A form posts without asking; what it posts is no JSON, and it cannot know the token."""

    async def main() -> None:
        async with admin_site(Site) as (made, client):
            made.rig.bring_up()
            form = {"content-type": "text/plain"}
            for method, path in (
                ("POST", "/admin/endpoints/e1/drain"),
                ("POST", "/admin/reload"),
                ("PUT", "/admin/log-level"),
            ):
                assert code(await client.request(method, path, headers=form, content=b"{}")) == (401, "invalid_api_key")
            origin = {"origin": "http://evil.example", **JSON}
            for path in ("/admin/state", "/admin/events", "/admin/openapi.json"):
                assert (await client.get(path, headers=origin)).status_code == 403
            assert (await client.delete("/admin/endpoints/e1", headers=origin)).status_code == 403
            assert (await client.get("/admin/state", headers={"host": "evil.example"})).status_code == 403
            assert not any(one.draining for one in made.rig.snapshots())
            assert (await client.post("/admin/endpoints/e1/drain", headers=BEARER)).json()["draining"] is True

    run(main())


def test_who_asks_about_one_endpoint_has_no_other_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000, each registration had all of them described, twice."""
    seen: list[str] = []

    def look(state: EndpointState, *more: Any) -> EndpointSnapshot:
        seen.append(state.endpoint.name)
        return snapshot_of(state, *more)

    async def main() -> None:
        async with site() as (_, client):
            monkeypatch.setattr(endpoint_set, "snapshot_of", look)
            entry = {"url": "http://10.0.0.9:8000", "name": "e3", "ttl": "30s"}
            assert (await client.post("/admin/endpoints", json=entry)).status_code == 201
            for path in ("e1/drain", "e1/undrain"):
                assert (await client.post(f"/admin/endpoints/{path}", headers=JSON)).status_code == 200
            assert set(seen) == {"e1"}

    run(main())


def test_an_endpoint_can_be_woken_and_put_to_sleep_unless_that_cannot_be() -> None:
    async def main() -> None:
        async with site() as (made, client):
            for path in ("wake", "sleep"):
                answer = await client.post(f"/admin/endpoints/e1/{path}", headers=JSON)
                assert answer.json() == {"name": "e1", "sleep": None}
            assert made.steering.awake == [True, False]
            made.steering.asleep_problem = "it is off"
            refused = await client.post("/admin/endpoints/e1/wake", headers=JSON)
            assert code(refused) == (409, "not_possible")
            assert "e1 cannot be woken: it is off." in refused.text
            assert code(await client.post("/admin/endpoints/no/wake", headers=JSON)) == (404, "unknown_endpoint")

    run(main())


def test_an_endpoint_registers_itself_and_renews_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal shows, and so looks through, none of the endpoints."""

    async def main() -> None:
        async with site() as (made, client):
            steering = made.steering
            steering.settings = parse("endpoints: [{url: http://10.0.0.1:8000, name: e1}]", environ={})
            entry: dict[str, object] = {"url": "http://10.0.0.7:8000", "name": "gpu", "ttl": "30s"}

            async def post(**more: object) -> httpx.Response:
                return await client.post("/admin/endpoints", json=entry | more)

            answer = await post()
            assert answer.status_code == 201
            assert answer.json() == {"name": "gpu", "keep": False, "ttl_s": 30.0, "endpoint": None}
            steering.now = 20.0
            with monkeypatch.context() as patch:
                patch.setattr(made.api._state, "endpoints", lambda: pytest.fail("it walks the fleet"))
                patch.setattr(steering.overlay.__class__, "register", lambda *_: pytest.fail("it makes all anew"))
                answer = await post(ttl=60)
            assert (answer.status_code, answer.json()["ttl_s"]) == (200, 60.0)
            assert steering.overlay.rest_s("gpu", 20.0) == 60.0
            answer = await post(url="http://10.0.0.8:8000")
            assert answer.status_code == 200
            assert [one.url for one in steering.settings.endpoints][1:] == ["http://10.0.0.8:8000"]
            assert code(await post(name="e1")) == (409, "not_registered")
            for name, url in (("gpu", "http://10.0.0.7:8000"), ("e1", "http://10.0.0.1:8000"), ("e1", "")):
                answer = await client.delete(f"/admin/endpoints/{name}", params={"url": url})
                assert code(answer) == (409, "not_registered"), "it is not who asks that has this name"
            answer = await client.delete("/admin/endpoints/gpu", params={"url": "http://10.0.0.8:8000"})
            assert answer.status_code == 200
            assert code(await client.delete("/admin/endpoints/no", params={"url": "x"})) == (404, "unknown_endpoint")
            for wrong in ({"keep": True}, {"keep": False}, {"ttl": "soon"}, {"ttl": None}, {"ttl": 0}, {"weight": "x"}):
                answer = await post(**wrong)
                assert code(answer) == (422, "invalid_endpoint")
                (problem,) = answer.json()["error"]["problems"]
                assert problem.startswith(next(iter(wrong)))
            assert code(await post(url="http://10.0.0.1:8000", name="new")) == (422, "invalid_endpoint")
            unknown = await client.post("/admin/endpoints", json=entry, headers={"Authorization": ""})
            assert unknown.status_code == 401

    run(main())


def test_what_is_wrong_is_said_in_one_shape() -> None:
    async def main() -> None:
        async with site() as (made, client):
            add = "/admin/endpoints"
            assert code(await client.post(add, headers=JSON, content=b"{")) == (400, "invalid_json")
            assert code(await client.post(add, headers=JSON, content=b"[]")) == (400, "invalid_json")
            assert code(await client.post(add, headers=JSON, content=b"x" * 100_000)) == (413, "request_too_large")
            assert code(await client.post(add, json={"url": "http://a:1", "keep": 1})) == (422, "invalid_endpoint")
            assert code(await client.post(add, json={})) == (422, "invalid_endpoint")
            for levels, expected in ((900, (422, "invalid_endpoint")), (5000, (400, "invalid_json"))):
                for deep in ('{"url":%s}', '{"url":"http://a:1","tls":%s}', '{"x":%s}'):
                    body = deep % ('{"a":' * levels + "1" + "}" * levels)
                    assert code(await client.post(add, headers=JSON, content=body)) == expected, (levels, deep)
            assert code(await client.put("/admin/log-level", json={"level": ["x"]})) == (422, "invalid_level")
            for limit in ("0", "-1", "x", "1001", "9" * 5000, "٣"):
                assert code(await client.get("/admin/decisions", params={"limit": limit})) == (400, "invalid_limit")
            assert code(await client.get("/admin/endpoints/no")) == (404, "unknown_endpoint")
            assert code(await client.post("/admin/endpoints/no/drain", headers=JSON)) == (404, "unknown_endpoint")
            assert code(await client.delete("/admin/endpoints/no")) == (404, "unknown_endpoint")
            said = (await client.post("/admin/endpoints/no/drain", headers=JSON)).json()["error"]["message"]
            assert said == "There is no endpoint no. There are: e1, e2."
            assert code(await client.get("/admin/decisions/no")) == (404, "unknown_request")
            assert code(await client.get("/admin/nothing")) == (404, "unknown_url")
            assert code(await client.post("/admin/state", headers=JSON)) == (405, "method_not_allowed")
            reloaded = (await client.post("/admin/reload", headers=JSON)).json()
            assert reloaded["changed"] == ["routing.policy: random, was adaptive"]
            assert reloaded["at_next_start"] == ["listen"]
            made.steering.reloads = None
            assert code(await client.post("/admin/reload", headers=JSON)) == (409, "no_settings_file")
            made.steering.reloads = ReloadResult(["a: b"], [], [])
            refused = await client.post("/admin/reload", headers=JSON)
            assert refused.json()["error"]["problems"] == ["a: b"]

    run(main())


def test_a_name_may_have_anything_that_a_path_can_say() -> None:
    async def main() -> None:
        specs = [EndpointSpec(name="pool/[::1]:80", base_url="http://[::1]:80")]
        async with rig(*specs) as pool:
            made = Site(pool)
            made.admin.access.token = Secret.read(ADMIN_TOKEN)
            port = await made.admin.start("127.0.0.1", 0)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=BEARER) as client:
                answer = await client.post("/admin/endpoints/pool%2F%5B::1%5D:80/drain", headers=JSON)
                assert answer.json()["name"] == "pool/[::1]:80"
            await made.admin.close()

    run(main())


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["url", "name", "keep", "level", "x"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=10)
@given(bodies=st.lists(JUNK, min_size=15, max_size=15), name=st.text(min_size=1, max_size=10))
def test_nothing_brings_out_a_500(bodies: list[object], name: str) -> None:
    async def main() -> None:
        async with site() as (made, client):
            for route in made.api.routes:
                if route.path == "/admin/events":
                    continue
                path = route.path.replace("{name}", "e1" if len(name) > 5 else "x").replace("{id}", "y")
                content = json.dumps(bodies.pop() if bodies else None).encode("utf-8", "surrogatepass")
                answer = await client.request(route.method, path, headers=JSON, content=content)
                assert answer.status_code < 500, (route, content)
                assert answer.json()
            junk = await client.get(
                f"/admin/decisions/{'%'.join(f'{byte:02x}' for byte in name.encode('utf-8', 'replace'))}"
            )
            assert junk.status_code in {200, 400, 404}

    run(main())


def test_draining_what_was_removed_says_how_far_it_is() -> None:
    async def main() -> None:
        async with site() as (made, client):
            made.rig.bring_up()
            ticket = submit(made.rig.runtime, InferenceRequest("r", None))
            assert ticket.placed_on is not None
            name = ticket.placed_on.endpoint.name
            made.rig.runtime.set_endpoints([])
            listed = (await client.get("/admin/endpoints")).json()["endpoints"]
            assert [(one["name"], one["leaving"], one["in_flight"]) for one in listed] == [(name, True, 1)]
            progress = (await client.post(f"/admin/endpoints/{name}/drain", headers=JSON)).json()
            assert (progress["leaving"], progress["in_flight"], progress["drained"]) == (True, 1, False)
            assert (await client.post(f"/admin/endpoints/{name}/undrain", headers=JSON)).status_code == 404
            made.rig.runtime.close(ticket, Outcome.COMPLETED)
            assert (await client.get("/admin/endpoints")).json() == {"endpoints": []}

    run(main())


def test_a_body_that_stops_gets_408(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    monkeypatch.setattr(deadlines, "SWEEP_S", 0.05)

    async def main() -> None:
        async with site() as (made, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", made.admin.port)
            writer.write(
                b"POST /admin/endpoints HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                b"Authorization: Bearer %b\r\nContent-Length: 99\r\n\r\n{" % ADMIN_TOKEN.encode()
            )
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 408 ")
            assert json.loads(body)["error"]["code"] == "request_timeout"

    run(main())
    assert not caplog.records


# --- The feed ---------------------------------------------------------------------------------------------------------


def test_a_frame_is_rendered_once_for_all_viewers_and_only_while_there_are_some() -> None:
    async def main() -> None:
        async with site() as (made, client):
            rendered = 0
            render = made.api.feed._render

            def counting() -> dict[str, object]:
                nonlocal rendered
                rendered += 1
                return render()

            made.api.feed._render = counting

            async def view() -> list[str]:
                ids: list[str] = []
                async with client.stream("GET", "/admin/events") as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("id: "):
                            ids.append(line)
                        if len(ids) == 2:
                            return ids
                raise AssertionError("it ended")

            seen = await asyncio.gather(*(view() for _ in range(5)))
            assert all(len(ids) == 2 for ids in seen)
            assert rendered <= 4, "5 viewers, 2 or 3 frames"
            await until(lambda: made.api.feed.viewers == 0)
            before = rendered
            await asyncio.sleep(api_module.PERIOD_S)
            assert rendered == before

    run(main())


def test_viewers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "MAX_VIEWERS", 1)

    async def main() -> None:
        async with site() as (made, client), client.stream("GET", "/admin/events") as one:
            assert one.status_code == 200
            assert code(await client.get("/admin/events")) == (503, "too_many_viewers")
            made.api.feed.close()
            assert (await one.aread()).count(b"event: state") >= 1, "and it ends when lbproxy does"

    run(main())


def test_a_viewer_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those who read go on."""
    monkeypatch.setattr(api_module, "STALLED_S", 0.5)
    monkeypatch.setattr(api_module, "PERIOD_S", 0.05)

    async def main() -> None:
        async with site() as (made, client):
            made.api.feed._render = lambda: {"large": "x" * (4 << 20)}
            _, writer = await asyncio.open_connection("127.0.0.1", made.admin.port, limit=1 << 10)
            writer.write(b"GET /admin/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            async with client.stream("GET", "/admin/events") as other:
                parts = other.aiter_raw()
                await until(lambda: made.api.feed.viewers == 2)
                while made.api.feed.viewers == 2:
                    await anext(parts)
                await anext(parts)
            writer.close()

    run(main())


# --- What happened of late --------------------------------------------------------------------------------------------


def record(request_id: str, **more: object) -> RequestRecord:
    made = RequestRecord(request_id, "POST", "/v1/completions", "127.0.0.1", 10.0)
    made.attempts, made.outcome, made.status, made.endpoint = 1, Outcome.COMPLETED, 200, "e1"
    made.stream, made.placed_at, made.first_byte_at, made.ended_at = True, 10.0, 10.25, 11.0
    made.wait = Wait.FULL
    for name, value in more.items():
        setattr(made, name, value)
    return made


def ids(recent: Recent, limit: int = 100, endpoint: str | None = None) -> list[object]:
    return [one["id"] for one in recent.requests(limit, endpoint=endpoint)]


def test_the_last_so_many_are_kept_the_newest_first() -> None:
    recent = Recent(3, lambda: 20.0, list)
    for n in range(5):
        recent.ended([record(str(n), endpoint=f"e{n % 2}")])
    assert ids(recent) == ["4", "3", "2"]
    assert ids(recent, 1) == ["4"]
    assert ids(recent, endpoint="e1") == ["3"]
    recent.reconfigure(2)
    assert ids(recent) == ["4", "3"]
    recent.reconfigure(0)
    recent.ended([record("5")])
    assert ids(recent) == []


def test_what_never_came_to_the_balancer_is_not_kept() -> None:
    recent = Recent(10, lambda: 20.0, list)
    recent.ended([record("404", attempts=0, wait=None, outcome=Outcome.UNKNOWN_URL)])
    recent.ended([record("429", attempts=0, wait=None, outcome=Outcome.SATURATED)])
    recent.ended([record("of many", wait=None)])
    recent.ended([record("broke", wait=None, outcome=Outcome.UPSTREAM_BROKE)])
    recent.ended([record("again", wait=None, attempts=2)])
    assert ids(recent) == ["again", "broke", "of many", "429"]


def test_a_running_request_comes_before_one_that_ended_under_the_same_id() -> None:
    running = record("r", endpoint="e2")
    running.decision = None
    recent = Recent(10, lambda: 20.0, lambda: [running])
    recent.ended([record("r")])
    found = recent.explain("r")
    assert found is not None
    assert (found["running"], found["endpoint"]) == (False, "e1"), "the running one has no decision yet"


@pytest.mark.parametrize("known", ["r", "chatcmpl-r", "cmpl-r"])
def test_a_request_is_found_by_the_id_of_its_response(known: str) -> None:
    """A gateway in front shows its clients that one alone. An id that begins so by itself is found as it is."""
    recent = Recent(10, lambda: 20.0, list)
    recent.ended([record("r"), record("chatcmpl-other")])
    for name, found in ((known, recent.explain(known)), ("chatcmpl-other", recent.explain("chatcmpl-other"))):
        assert found is not None
        assert found["id"] == ("r" if name == known else name)
    assert recent.explain("chatcmpl-") is None


@pytest.mark.parametrize(
    ("begin", "found"),
    [("4c98…", "4c98a8b6a33c"), ("chatcmpl-4c98a", "4c98a8b6a33c"), ("4c9", None), ("nigh", None), ("", None)],
)
def test_a_request_is_found_by_the_begin_of_its_id_if_that_is_enough(begin: str, found: str | None) -> None:
    """Tables cut ids, and people type half of one; what fits two requests must not show the wrong one."""
    recent = Recent(10, lambda: 20.0, list)
    recent.ended([record("4c98a8b6a33c"), record("night-1"), record("night-2"), record("night-1")])
    explained = recent.explain(begin)
    assert (explained and explained["id"]) == found
    assert (recent.explain("night-1") or {})["id"] == "night-1"


def test_a_request_for_which_all_were_down_says_so() -> None:
    """Else nothing says which servers there are."""
    gone = [(Endpoint(name="gpu-1", base_url="http://gpu-1:1", uid=EndpointUid(1)), "down")]
    recent = Recent(10, lambda: 20.0, list, lambda: gone)
    nowhere = record("nowhere", endpoint=None, attempts=0, wait=None, outcome=Outcome.NO_ENDPOINTS, decision=None)
    recent.ended([nowhere, record("other")])
    gone.clear()  # what was then, not what is now
    explained = [recent.explain(name) or {} for name in ("nowhere", "other")]
    assert [one["left_out"] for one in explained] == [[{"endpoint": "gpu-1", "why": "down"}], []]


def test_a_request_that_was_held_says_for_which_endpoint_and_why() -> None:
    recent = Recent(10, lambda: 20.0, list)
    recent.ended([record("any"), record("held", wait=Wait.HELD, held_for="e2", full_by="requests")])
    explained = [recent.explain(name) for name in ("any", "held")]
    assert [one and one["waited"] for one in explained] == [
        {"because": "full", "meaning": WAITS[Wait.FULL], "endpoint": None, "full_by": None, "wake": None},
        {
            "because": "held",
            "meaning": f"{WAITS[Wait.HELD]}; e2 ran as many requests as it could",
            "endpoint": "e2",
            "full_by": "requests",
            "wake": None,
        },
    ]


def test_a_request_that_waits_is_explained_before_it_has_an_endpoint() -> None:
    waits = record("w", endpoint=None, attempts=0, wait=Wait.WAKING, placed_at=None, decision=None)
    waits.wake_predicted_s = 4.0
    recent = Recent(10, lambda: 20.0, lambda: [waits])
    found = recent.explain("w")
    assert found is not None
    assert (found["running"], found["queue_ms"]) == (True, 10_000.0)
    assert found["waited"] == {
        "because": "waking",
        "meaning": f"{WAITS[Wait.WAKING]}; the wake was predicted to take 4.0 s",
        "endpoint": None,
        "full_by": None,
        "wake": {"predicted_ms": 4000.0, "took_ms": None},
    }


def test_endpoints_are_judged_by_what_they_had_last() -> None:
    recent = Recent(10, lambda: 20.0, list)
    recent.ended([record("a", usage=Usage(100, 50, 10))])
    recent.ended([record("b", usage=Usage(300, 50, 10), first_byte_at=10.75)])
    recent.ended([record("c", stream=False, first_byte_at=19.0)])
    recent.ended([record("d", outcome=Outcome.UPSTREAM_BROKE, first_byte_at=None)])
    recent.ended([record("e", endpoint="e2", placed_at=None)])
    clients, ours = Outcome.CLIENT_CLOSED, Outcome.CUT
    recent.ended([record("f", outcome=clients, first_byte_at=None), record("g", outcome=ours, first_byte_at=None)])
    assert recent.by_endpoint() == {
        "e1": {
            "requests": 6,
            "failed": 1,
            "first_byte_ms": 500.0,
            "first_byte_off": None,
            "hit_ratio": 0.25,
            "predicted_hit_ratio": None,
        }
    }


def test_drains_are_among_the_transitions_once_each() -> None:
    async def main() -> None:
        async with site() as (made, client):
            made.rig.bring_up()
            for path in ("drain", "drain", "undrain", "undrain"):
                assert (await client.post(f"/admin/endpoints/e1/{path}", headers=JSON)).status_code == 200
            found = (await client.get("/admin/state")).json()["transitions"]
            assert [(one["endpoint"], one["from"], one["to"], one["reason"]) for one in found[:2]] == [
                ("e1", "draining", "up", "an operator undrained it"),
                ("e1", "up", "draining", "an operator drained it"),
            ]
            assert [one["to"] for one in found].count("draining") == 1

    run(main())


def test_transitions_are_bounded() -> None:
    recent = Recent(0, lambda: 20.0, list)
    endpoint = Endpoint(uid=EndpointUid(1), name="e1", base_url="http://10.0.0.1:8000")
    for n in range(MAX_TRANSITIONS + 5):
        recent.transition(Transition(endpoint, Health.UP, Health.DOWN, str(n)))
    assert len(recent.transitions()) == MAX_TRANSITIONS
    assert recent.transitions()[0]["reason"] == str(MAX_TRANSITIONS + 4)


def test_history_is_what_was_counted_since_the_last_step() -> None:
    counted = [RequestTotals([0] * (len(FIRST_BYTE_BUCKETS) + 1), 0)]

    async def main() -> None:
        async with site() as (made, _):
            none = made.rig.balancer.queue(now=0.0)
            queues = [none, replace(none, waiting=2, by_reason={"space": 2})]
            endpoints = made.rig.balancer.endpoints
            progress = next(iter(endpoints.members())).standing.progress
            history = History(lambda: counted[-1], endpoints.every, queues.pop)
            progress.tokens_streamed = 7
            history.sample(5.0)
            assert history.points[-1]["completion_tokens"] == 7, "of streams, whose usage may never come"
            progress.tokens_streamed, queues[:] = 30, [none] * (STEPS + 2)
            before = {"prompt_tokens": 400, "cached_tokens": 100, "requests": 10, "errors": 2, "rejected": 1}
            counted.append(RequestTotals([*counted[0].first_bytes], 50, **before))
            counted[-1].first_bytes[2] = 4  # from 25 to 50 ms
            history.sample(5.0)
            first, point = history.points
            assert (first["waiting"], first["waiting_by_reason"]) == (2, {"space": 2})
            assert {name: point[name] for name in before} == before
            assert (point["waiting"], point["waiting_by_reason"]) == (0, {})
            assert point["completion_tokens"] == 50 + 30 - 7
            assert point["first_byte_ms"] == {"p50": 37.5, "p95": 48.75}
            history.sample(5.0)
            assert history.points[-1]["requests"] == 0
            assert history.points[-1]["first_byte_ms"] == {"p50": None, "p95": None}
            for _ in range(STEPS):
                history.sample(5.0)
            assert len(history.points) == STEPS

    run(main())


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    counts = [0] * len(FIRST_BYTE_BUCKETS) + [3]
    assert quantile_ms(counts, 0.5) == 1000 * FIRST_BYTE_BUCKETS[-1]


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_what_is_added_lies_over_the_file_as_far_as_it_is_to_be_kept() -> None:
    file = parse(SETTINGS, environ={})
    overlay, now = Overlay().add(file, {"url": "http://10.0.0.3:8000", "name": "e3"}, keep=True)
    overlay, now = overlay.add(now, {"url": "http://10.0.0.4:8000"}, keep=False)
    assert [one.name for one in now.endpoints] == ["e1", "e2", "e3", "10.0.0.4:8000"]
    after, reloaded = overlay.over(now, file)
    assert [one.name for one in reloaded.endpoints] == ["e1", "e2", "e3"]
    assert {name: one.keep for name, one in after.added.items()} == {"e3": True}
    theirs = parse(SETTINGS.replace("]", ", {url: http://10.0.0.3:8000, name: other}]"), environ={})
    after, reloaded = overlay.over(now, theirs)
    assert [one.name for one in reloaded.endpoints] == ["e1", "e2", "other"]
    assert after.added == {}
    with pytest.raises(UnknownEntryError):
        overlay.remove(now, "e9")
    overlay, now = overlay.remove(now, "e3")
    assert {name: one.keep for name, one in overlay.added.items()} == {"10.0.0.4:8000": False}
    with pytest.raises(ConfigError) as error:
        overlay.add(now, {"url": "http://10.0.0.1:8000", "health": 5}, keep=False)
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["health"]


def test_another_process_makes_the_same_changes_again() -> None:
    """A balancer process after another: it has the text of the settings, and what was changed."""
    file = parse(SETTINGS, environ={})
    overlay, now = Overlay().add(file, {"url": "http://10.0.0.3:8000", "name": "e3", "weight": 2}, keep=True)
    overlay, now = overlay.add(now, {"url": "http://10.0.0.4:8000"}, keep=False)
    overlay, now = overlay.add(now, {"url": "http://10.0.0.5:8000"}, keep=False)
    for name in ("e1", "10.0.0.5:8000"):
        overlay, now = overlay.remove(now, name)
    again, settings = Overlay.again(parse(SETTINGS, environ={}), overlay.changes)
    assert (again, settings) == (overlay, now)
    assert [one.name for one in settings.endpoints] == ["e2", "e3", "10.0.0.4:8000"]
    after, reloaded = again.over(settings, file)
    assert [one.name for one in reloaded.endpoints] == ["e1", "e2", "e3"]
    assert after.changes == ((({"url": "http://10.0.0.3:8000", "name": "e3", "weight": 2}, True, None),), ())


@pytest.mark.parametrize(
    "entry", [{"url": "file:/etc/shadow"}, {"url": "https://10.0.0.3:8000", "tls": {"ca": "/etc/shadow"}}]
)
def test_who_may_call_the_api_may_not_have_files_read(entry: dict[str, object]) -> None:
    """What is wrong with a file would be told, and so what is in it."""
    with pytest.raises(ConfigError) as error:
        Overlay().add(parse(SETTINGS, environ={}), entry, keep=False)
    assert error.value.problems == ("endpoint: expected no files, which only the settings file may name",)


def test_secrets_are_not_shown() -> None:
    token = "0123456789abcdef0123"
    text = f"admin: {{host: 127.0.0.1, port: 9901, token: {token}}}\n{SETTINGS}"
    shown = without_secrets(parse(text, environ={}))
    assert token not in json.dumps(shown)
    address = {"unix": None, "mode": "0660", "host": "127.0.0.1", "port": 9901}
    assert shown["admin"] == {**address, "token": "***"}
    assert set(shown) == set(Settings.model_fields)


def test_all_that_is_no_secret_is_shown() -> None:
    """Also what is called a token or a key and is none."""
    secrets = [f"hidden-{n}-0123456789" for n in range(6)]
    text = f"""
listen: {{host: 127.0.0.1, port: 8080, tls: {{cert: c.pem, key: k.pem}}}}
admin: {{host: 127.0.0.1, port: 9901, token: {secrets[0]}}}
auth: {{keys: [{secrets[1]}, {{name: team-b, key: {secrets[2]}}}]}}
traces: {{endpoint: "http://c:4318", headers: {{authorization: {secrets[3]}, x-key: {secrets[4]}}}}}
models: {{my_key: {{split: {{api_key: 1, other_token: 2}}}}}}
flows: {{named: {{team_secret: {{tokens_per_minute: 1000}}}}}}
endpoints: [{{url: "http://a:1", api_key: {secrets[5]}, kv_cache_tokens: 300000, weight: 2}}]
"""
    shown = without_secrets(parse(text, environ={}))
    assert not [secret for secret in secrets if secret in json.dumps(shown)]
    endpoint = shown["endpoints"][0]  # type: ignore[index]
    assert {key: endpoint[key] for key in ("kv_cache_tokens", "weight", "api_key")} == {
        "kv_cache_tokens": 300_000,
        "weight": 2.0,
        "api_key": "***",
    }
    assert shown["listen"]["tls"]["key"] == "k.pem"  # type: ignore[index]
    assert shown["auth"]["keys"] == [{"name": "key-1", "key": "***"}, {"name": "team-b", "key": "***"}]  # type: ignore[index]
    assert shown["traces"]["headers"] == {"authorization": "***", "x-key": "***"}  # type: ignore[index]
    assert shown["models"]["my_key"]["split"] == {"api_key": 1.0, "other_token": 2.0}  # type: ignore[index]
    assert shown["flows"]["named"]["team_secret"]["tokens_per_minute"] == 1000  # type: ignore[index]


def test_what_is_called_a_secret_is_one_by_its_type() -> None:
    """The type hides it wherever it is shown; a name that looks like one must be known to be none."""
    none = {"EndpointSettings.kv_cache_tokens", "TlsSettings.key", "AuthSettings.keys"}
    none |= {"EndpointSettings.tokens_per_minute", "EndpointSettings.tokens_per_day"}
    none |= {"FlowSettings.tokens_per_minute", "EngineSettings.block_size_tokens"}
    none |= {"ExplainSettings.header", "FlowsSettings.header", "EndpointSettings.forward_headers"}
    sections: list[type[BaseModel]] = [Settings]
    suspicious = set()
    for section in sections:
        for name, field in section.model_fields.items():
            kinds = [field.annotation, *get_args(field.annotation)]
            kinds += [inner for kind in kinds for inner in get_args(kind)]
            found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
            sections += [kind for kind in found if kind not in sections]
            if re.search("key|token|secret|password|credential|header", name) and not {Secret, SecretStr} & set(kinds):
                suspicious.add(f"{section.__name__}.{name}")
    assert len(sections) > 20
    assert suspicious <= none, suspicious - none


def test_a_waiting_request_is_part_of_the_queue_that_is_shown() -> None:
    async def main() -> None:
        async with site() as (made, client):
            runtime = made.rig.runtime
            tickets = [submit(runtime, InferenceRequest(str(n), "m", priority=n)) for n in (0, 0, 5)]
            assert all(one.state is TicketState.WAITING for one in tickets)
            queue = (await client.get("/admin/state")).json()["queue"]
            assert (queue["waiting"], queue["by_priority"], queue["by_model"]) == (3, {"0": 2, "5": 1}, {"m": 3})
            assert queue["by_reason"] == {"full": 3}
            assert queue["oldest_s"] >= 0
            for one in tickets:
                runtime.close(one, Outcome.CLIENT_CLOSED)

    run(main())


def test_every_reason_to_wait_has_a_meaning_and_every_refusal_is_remembered() -> None:
    assert set(WAITS) == set(Wait)
    assert set(FULL) == set(FULL_BY)
    busy = {one for one in Outcome if one.value.status == 429}
    assert busy <= REFUSED
