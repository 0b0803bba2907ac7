# SPDX-License-Identifier: Apache-2.0
"""Web pages of other origins: what a browser must be told before it lets them ask, and read the answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.request.cors import Cors
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run
from tests.support.endpoint import LAST, OK, Received, ScriptedEndpoint, Wire, answer
from tests.support.rig import Reply, post, rig, settings_for

PAGE = "https://chat.example"
ONE = f"cors: {{origins: ['{PAGE}', 'http://localhost:3000']}}"
ANY = "cors: {origins: ['*']}"
FROM_PAGE = f"Origin: {PAGE}\r\n"
FROM_ELSEWHERE = "Origin: https://elsewhere.example\r\n"
ORIGIN, EXPOSED = "access-control-allow-origin", "access-control-expose-headers"


def preflight(origin: str = PAGE, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    fields = "authorization,content-type,x-stainless-os"
    return (
        f"OPTIONS {path} HTTP/1.1\r\nHost: lb\r\nOrigin: {origin}\r\nAccess-Control-Request-Method: POST\r\n"
        f"Access-Control-Request-Headers: {fields}\r\n{more}\r\n"
    ).encode()


def values(reply: Reply, name: str) -> list[str]:
    lines = reply.head.decode().split("\r\n")[1:]
    return [line.partition(":")[2].strip() for line in lines if line.lower().startswith(f"{name}:")]


@pytest.mark.parametrize(("more", "allowed"), [(ONE, PAGE), (ANY, "*")])
def test_a_preflight_is_answered_by_us_without_key_or_server(more: str, allowed: str) -> None:
    """A browser sends no key with it, and it must not wait in a queue."""

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=more, up=False) as it:
            for path in ("/v1/chat/completions", "/v1/models", "/nowhere"):
                client = await it.connect()
                client.send(preflight(path=path))
                reply = await client.reply(bodiless=True)
                assert (reply.status, reply.body) == (204, b"")
                assert values(reply, ORIGIN) == [allowed]
                assert values(reply, "access-control-allow-headers") == ["authorization,content-type,x-stainless-os"]
                assert "POST" in values(reply, "access-control-allow-methods")[0]
                assert values(reply, "access-control-max-age") == ["600"]
                assert values(reply, "vary") == ["Origin"]
                assert not values(reply, "content-length")
                client.send(preflight(path=path))
                assert (await client.reply(bodiless=True)).status == 204, "the connection lives on"
            assert not endpoint.requests
            assert {(one.route, one.outcome, one.status) for one in it.records.requests} == {
                ("preflight", Outcome.COMPLETED, 204)
            }

    run(main())


def test_the_page_about_settings_shows_a_preflight_as_it_is() -> None:
    text = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    begins = ("OPTIONS /v1", "HTTP/1.1 204")
    asked, said = (re.search(rf"^```\n({begin}.*?\n)```$", text, re.MULTILINE | re.DOTALL) for begin in begins)
    assert asked is not None
    assert said is not None

    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=ONE) as it:
            client = await it.connect()
            client.send(f"{asked[1]}\n".replace("\n", "\r\n").encode())
            head = (await client.reply(bodiless=True)).head.decode()
            shown = re.sub("x-request-id: .*", f"x-request-id: {it.records.requests[0].id}", f"{said[1]}\n")
            assert head.replace("\r\n", "\n") == shown

    run(main())


def test_the_page_may_read_each_field_of_ours_that_the_page_about_failures_names() -> None:
    text = (Path(__file__).parents[3] / "docs" / "failures.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?m)^- `(x-lbproxy-[a-z-]+)`: ", text))
    (exposed,) = re.findall(r"(?m)^Access-Control-Expose-Headers: (.*)\r$", Cors([PAGE]).fields_for(PAGE))
    assert "x-lbproxy-tier" in named
    assert not named - set(exposed.split(", "))


def test_with_keys_only_the_preflight_goes_without_and_a_refusal_can_be_read() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url, more=ONE) as it:
            it.front.requests.keys = KeyRing({})
            client = await it.connect()
            client.send(preflight())
            assert (await client.reply(bodiless=True)).status == 204
            plain_options = f"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: lb\r\n{FROM_PAGE}\r\n".encode()
            for data in (plain_options, post(more=FROM_PAGE)):
                reply = await it.ask(data)
                assert (reply.status, values(reply, ORIGIN)) == (401, [PAGE])
            assert not endpoint.requests

    run(main())


def test_a_reload_changes_who_may() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url) as it:
            for more, expected in ((ONE, [PAGE]), ("", [])):
                it.front.reconfigure(settings_for([endpoint.url], more))
                assert values(await it.ask(post(more=FROM_PAGE)), ORIGIN) == expected

    run(main())


def test_a_page_that_may_not_is_not_told_that_it_may() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(OK) as endpoint, rig(endpoint.url, more=ONE) as it:
            for data in (preflight("https://elsewhere.example"), preflight("null"), post(more=FROM_ELSEWHERE), post()):
                client = await it.connect()
                client.send(data)
                reply = await client.reply(bodiless=data.startswith(b"OPTIONS"))
                assert reply.status in {200, 204}
                assert b"access-control" not in reply.head.lower()
                assert values(reply, "vary") == ["Origin"], "or a cache gives this to a page that may"

    run(main())


@pytest.mark.parametrize(("more", "allowed"), [(ONE, PAGE), (ANY, "*")])
def test_every_response_can_be_read_by_the_page(more: str, allowed: str) -> None:
    """Ours and servers', good and bad; servers' own words on origins are replaced, as two would be refused."""
    theirs = ["Access-Control-Allow-Origin: *", "access-control-allow-credentials: true", "X-Kept: 1", "Vary: Accept"]

    async def stream(wire: Wire, request: Received) -> None:
        if b"stream" not in request.body:
            await wire.send(whole)
            return
        fields = "\r\n".join(theirs).encode()
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n%b\r\n" % fields)
        await wire.send(b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", LAST)

    whole = answer(more="".join(f"{line}\r\n" for line in theirs))

    async def main() -> None:
        async with ScriptedEndpoint(stream) as endpoint, rig(endpoint.url, more=more) as it:
            relayed = [
                await it.ask(post(more=FROM_PAGE)),
                await it.ask(post(b'{"model":"m","stream":true}', more=FROM_PAGE)),
            ]
            for reply in relayed:
                assert reply.status == 200
                assert values(reply, "x-kept") == ["1"]
                assert values(reply, "vary") == ["Accept", "Origin"]
                assert not values(reply, "access-control-allow-credentials")
            ours = [
                (f"GET /v1/models HTTP/1.1\r\nHost: lb\r\n{FROM_PAGE}\r\n".encode(), 200),
                (f"GET /nowhere HTTP/1.1\r\nHost: lb\r\n{FROM_PAGE}\r\n".encode(), 404),
                (post(b"{", more=FROM_PAGE), 400),
                (post(b'{"model":"other"}', more=FROM_PAGE), 404),
                (post(more=FROM_PAGE + "Content-Encoding: gzip\r\n"), 415),
                (f"GET /v1/models HTTP/1.1\r\nHost: a/b\r\n{FROM_PAGE}\r\n".encode(), 400),
            ]
            for data, status in ours:
                relayed.append(await it.ask(data))
                assert relayed[-1].status == status
            for reply in relayed:
                assert values(reply, ORIGIN) == [allowed], reply.head
                assert "x-request-id" in values(reply, EXPOSED)[0]
                assert "x-lbproxy-reason" in values(reply, EXPOSED)[0]

    run(main())


def test_nothing_is_said_where_the_settings_say_nothing() -> None:
    """Servers' own words pass, and OPTIONS goes to a server, as without a proxy."""

    async def main() -> None:
        script = answer(more="Access-Control-Allow-Origin: *\r\n")
        async with ScriptedEndpoint(script) as endpoint, rig(endpoint.url) as it:
            for data in (post(more=FROM_PAGE), preflight()):
                reply = await it.ask(data)
                assert (values(reply, ORIGIN), values(reply, "vary")) == (["*"], [])
            assert [one.line.partition(" ")[0] for one in endpoint.requests] == ["POST", "OPTIONS"]
            assert endpoint.requests[0].field("origin") == PAGE
            reply = await it.ask(f"GET /v1/models HTTP/1.1\r\nHost: lb\r\n{FROM_PAGE}\r\n".encode())
            assert b"access-control" not in reply.head.lower()

    run(main())


def test_what_is_no_request_says_what_it_can() -> None:
    async def main() -> None:
        for more, expected in ((ANY, ["*"]), (ONE, [])):
            async with ScriptedEndpoint() as endpoint, rig(endpoint.url, more=more) as it:
                reply = await it.ask(b"nonsense\r\n\r\n")
                assert (reply.status, values(reply, ORIGIN)) == (400, expected)

    run(main())


@pytest.mark.parametrize("wanted", ["x\r\nevil: 1", "é", "x" * 5000, "a;b", ""])
def test_names_that_are_none_are_not_allowed(wanted: str) -> None:
    """They would stand in our own head."""
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
    said = Cors([PAGE]).preflight("OPTIONS", asked)
    assert said is not None
    assert "Access-Control-Allow-Methods" in said
    assert "Allow-Headers" not in said


def test_an_ordinary_options_request_is_no_preflight() -> None:
    assert Cors([PAGE]).preflight("OPTIONS", {"Origin": PAGE}) is None
    assert Cors([PAGE]).preflight("POST", {"Origin": PAGE, "Access-Control-Request-Method": "POST"}) is None
