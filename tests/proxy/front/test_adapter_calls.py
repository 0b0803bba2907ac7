# SPDX-License-Identifier: Apache-2.0
"""Loading and unloading adapters through lbproxy, and endpoints that do not have the adapter that they listed."""

from __future__ import annotations

import json

import pytest

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.proxy.front.adapter_calls import MAX_CALLS
from tests.support.aio import run, until
from tests.support.endpoint import OK, Script, ScriptedEndpoint, answer, hang, reset
from tests.support.pool import MODEL, card
from tests.support.rig import RawClient, Reply, Rig, post, rig

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NEW = b'{"lora_name": "new", "lora_path": "/adapters/new"}'
ALLOWED = "lora_management: true"
SUCCESS = answer(b"Success: LoRA adapter 'new' added successfully.", kind="text/plain")
TWICE = answer(b'{"error": {"message": "has already been loaded"}}', status=400)


class Reader:
    """Stands in for a prober."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def refresh_models(self) -> None:
        self.asked.append("refresh")

    def doubt_models(self) -> None:
        self.asked.append("doubt")


def said(reply: Reply) -> list[tuple[str, int]]:
    body = json.loads(reply.body)
    assert body["object"] == "list"
    return [(one["endpoint"], one["status"]) for one in body["data"]]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_nobody_may_unless_the_settings_say_so(path: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as one, rig(one.url) as r:
            reply = await r.ask(post(NEW, path))
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (403, "forbidden")
            assert not one.requests

    run(main())


def test_it_goes_to_every_endpoint_as_it_came_and_each_one_answers() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(SUCCESS) as one,
            ScriptedEndpoint(SUCCESS) as two,
            rig(one.url, two.url, more=ALLOWED) as r,
        ):
            reader = Reader()
            with r.runtime.model_readers.kept(r.endpoints[1].base_url, reader):
                reply = await r.ask(post(NEW, LOAD, more="Authorization: Bearer k\r\n"))
            assert (reply.status, said(reply)) == (200, [("e1", 200), ("e2", 200)])
            assert json.loads(reply.body)["data"][0]["body"] == "Success: LoRA adapter 'new' added successfully."
            assert reader.asked == ["refresh"], "so that it can be used at once"
            for server in (one, two):
                (asked,) = server.requests
                assert (asked.line, asked.body) == (f"POST {LOAD} HTTP/1.1", NEW)
                assert asked.field("authorization") == "Bearer k"
            (record,) = r.records.requests
            assert (record.route, record.status, record.outcome.label) == ("adapters", 200, "completed")

    run(main())


@pytest.mark.parametrize("field", ["lora_name", "base_model_name"])
@pytest.mark.parametrize("name", ["x" * 257, "x\nforged", "", 1, ["x"]])
def test_what_can_be_no_name_is_neither_used_nor_logged(
    field: str, name: object, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(SUCCESS) as one, rig(one.url, more=ALLOWED) as r:
            reply = await r.ask(post(json.dumps({"lora_name": "new", field: name}).encode(), LOAD))
            assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, field)
            assert len(reply.body) < 500
            large = json.dumps({"lora_name": "new", "lora_path": "x" * (3 << 20)}).encode()
            assert (await r.ask(post(large, LOAD))).status == 413
            assert not one.requests

    run(main())
    assert not [record for record in caplog.records if record.message.startswith(LOAD)]


def test_a_query_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It may have a key."""

    async def main() -> None:
        async with ScriptedEndpoint(SUCCESS) as one, rig(one.url, more=ALLOWED) as r:
            assert (await r.ask(post(NEW, f"{LOAD}?api-key=secret"))).status == 200

    with caplog.at_level("INFO", logger="lbproxy"):
        run(main())
    assert [record for record in caplog.records if record.message.startswith(LOAD)]
    assert "secret" not in repr([record.__dict__ for record in caplog.records])


def test_an_answer_that_is_nested_deep_is_passed_on_all_the_same() -> None:
    deep = b'{"a":' * 500 + b"1" + b"}" * 500

    async def main() -> None:
        async with ScriptedEndpoint(answer(deep)) as one, rig(one.url, more=ALLOWED) as r:
            reply = await r.ask(post(NEW, LOAD))
            assert (reply.status, said(reply)) == (200, [("e1", 200)])
            assert b'"body":%s}' % deep in reply.body

    run(main())


@pytest.mark.parametrize(
    ("script", "status"),
    [(TWICE, 400), (reset, 502), (hang, 504), (answer(status=500), 500)],
    ids=["400", "reset", "hang", "500"],
)
def test_the_answer_is_the_worst_of_all(script: Script, status: int) -> None:
    async def main() -> None:
        more = f"{ALLOWED}\ntimeouts: {{first_byte: 300ms}}"
        async with (
            ScriptedEndpoint(SUCCESS) as one,
            ScriptedEndpoint(script) as two,
            rig(one.url, two.url, more=more) as r,
        ):
            reader = Reader()
            with r.runtime.model_readers.kept(r.endpoints[1].base_url, reader):
                reply = await r.ask(post(NEW, LOAD))
            assert (reply.status, said(reply)) == (status, [("e1", 200), ("e2", status)])
            assert reader.asked == ["refresh"] * (status == 400), "who has it already may not have been known to"
            assert "127.0.0.1" not in reply.body.decode()

    run(main())


def test_an_endpoint_that_is_down_is_not_asked_and_not_forgotten() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(SUCCESS) as one,
            ScriptedEndpoint(SUCCESS) as two,
            rig(one.url, two.url, more=ALLOWED) as r,
        ):
            for _ in range(5):
                r.runtime.report_health(r.endpoints[1].uid, False, "test")
            reply = await r.ask(post(NEW, LOAD))
            assert (reply.status, said(reply)) == (503, [("e1", 200), ("e2", 503)])
            assert not two.requests

    run(main())


def test_names_can_be_hidden() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(SUCCESS) as one, rig(one.url, more=f"{ALLOWED}\nexpose_endpoint: false") as r:
            reply = await r.ask(post(NEW, LOAD))
            assert [one.keys() for one in json.loads(reply.body)["data"]] == [{"status", "body"}]

    run(main())


def two_models(r: Rig) -> None:
    """e1 serves `m` with the adapter `a`, e2 serves `n`."""
    r.runtime.report_models(r.endpoints[0].uid, [card(MODEL), card("a", parent=MODEL)])
    r.runtime.report_models(r.endpoints[1].uid, [card("n"), card("b", parent="n")])


@pytest.mark.parametrize(
    ("path", "more", "asked"),
    [
        (LOAD, {"base_model_name": "n"}, ["e2"]),
        (LOAD, {"base_model_name": MODEL}, ["e1"]),
        (UNLOAD, {"lora_name": "b"}, ["e2"]),
        (LOAD, {}, 400),
        (UNLOAD, {}, 400),
        (LOAD, {"base_model_name": "other"}, 404),
        (LOAD, {"base_model_name": 3}, 400),
        (LOAD, {"lora_name": None}, 400),
    ],
)
def test_which_base_model_is_said_or_follows_or_is_asked_for(
    path: str, more: dict[str, object], asked: list[str] | int
) -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(SUCCESS) as one,
            ScriptedEndpoint(SUCCESS) as two,
            rig(one.url, two.url, more=ALLOWED) as r,
        ):
            two_models(r)
            reply = await r.ask(post(json.dumps({"lora_name": "new", "lora_path": "/x", **more}).encode(), path))
            if isinstance(asked, int):
                assert reply.status == asked
                assert set(json.loads(reply.body)["error"]) == {"message", "type", "param", "code"}
                assert not one.requests
                assert not two.requests
            else:
                assert (reply.status, [name for name, _ in said(reply)]) == (200, asked)

    run(main())


def test_other_methods_and_disguises_are_refused() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(SUCCESS) as one, rig(one.url, more=ALLOWED) as r:
            assert (await r.ask(post(NEW, "/v1//load_lora_adapter"))).status == 403
            assert (await r.ask(f"GET {LOAD} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).status == 405
            assert (await r.ask(post(b"{", LOAD))).status == 400
            assert not one.requests

    run(main())


def test_calls_are_bounded_and_end_with_their_clients() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(hang) as one, rig(one.url, more=ALLOWED) as r:
            clients: list[RawClient] = []
            for _ in range(MAX_CALLS):
                clients.append(await r.connect())
                clients[-1].send(post(NEW, LOAD))
            await until(lambda: one.asked(LOAD) == MAX_CALLS)
            reply = await r.ask(post(NEW, LOAD))
            assert (reply.status, json.loads(reply.body)["error"]["code"]) == (429, "rejected_saturated")
            for client in clients:
                client.writer.transport.abort()
            await until(lambda: all(wire.gone.is_set() for wire in one.wires), "nobody waits for the endpoint any more")
            one.scripts[LOAD] = SUCCESS
            assert (await r.ask(post(NEW, LOAD))).status == 200

    run(main())


# --- 404 for an adapter -----------------------------------------------------------------------------------------------

UNKNOWN = answer(b'{"error":{"message":"The model `a` does not exist.","type":"NotFoundError","code":404}}', status=404)
CHAT = b'{"model": "a", "messages": []}'


def adapters_everywhere(r: Rig) -> dict[EndpointUid, Reader]:
    for endpoint in r.endpoints:
        r.runtime.report_models(endpoint.uid, [card(MODEL), card("a", parent=MODEL)])
    return {endpoint.uid: Reader() for endpoint in r.endpoints}


@pytest.mark.parametrize("model", ["a", MODEL])
def test_a_model_that_one_endpoint_lost_is_asked_for_at_another(model: str) -> None:
    """An adapter, or the model of a server that was started anew with another one."""

    async def main() -> None:
        more = "routing: {policy: round-robin}"
        async with ScriptedEndpoint(UNKNOWN) as one, ScriptedEndpoint(OK) as two, rig(one.url, two.url, more=more) as r:
            adapters_everywhere(r)
            reader = Reader()
            with r.runtime.model_readers.kept(r.endpoints[0].base_url, reader):
                chat = json.dumps({"model": model, "messages": []}).encode()
                replies = [await r.ask(post(chat)) for _ in range(4)]
            assert [reply.status for reply in replies] == [200] * 4
            assert {reply.field("x-lbproxy-endpoint") for reply in replies} == {"e2"}
            assert one.requests, "it was asked"
            assert set(reader.asked) == {"doubt"}, "and is asked what it does serve"
            assert r.records.requests[0].failed in {(), (("e1", "upstream_404"),)}
            assert r.seen("e1").health.value == "up", "it is not to blame"

    run(main())


def test_an_adapter_that_nobody_has_is_a_404_in_the_servers_words() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(UNKNOWN) as one, ScriptedEndpoint(UNKNOWN) as two, rig(one.url, two.url) as r:
            adapters_everywhere(r)
            reply = await r.ask(post(CHAT))
            assert (reply.status, json.loads(reply.body)["error"]["type"]) == (404, "NotFoundError")
            assert len(one.requests) == len(two.requests) == 1

    run(main())


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"model": "a", "input": "x"}', "/v1/embeddings"),
        (b'{"model": "a"}', "/v1/responses"),
    ],
    ids=["a path that not all have", "another such path"],
)
def test_every_other_404_is_the_clients(body: bytes, path: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(UNKNOWN) as one, ScriptedEndpoint(UNKNOWN) as two, rig(one.url, two.url) as r:
            adapters_everywhere(r)
            reply = await r.ask(post(body, path))
            assert reply.status == 404
            assert len(one.requests) + len(two.requests) == 1

    run(main())
