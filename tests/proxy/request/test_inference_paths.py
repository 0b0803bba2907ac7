# SPDX-License-Identifier: Apache-2.0
"""`inference_paths`: a request there is placed by the model that its server reads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.sections.clients import KNOWN_PATHS
from lbproxy.config.text import ConfigError
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.routes import _ROUTES, find_route
from tests.support.aio import run
from tests.support.endpoint import ScriptedEndpoint, answer
from tests.support.pool import card
from tests.support.rig import Rig, post, rig

PATHS = ["/v2/models/{model}/*", "/predict"]
SETTINGS = f"inference_paths: {json.dumps(PATHS)}\nmodels: {{alias: a, down: {{fallback: [b]}}}}"
ONE = b'{"inputs": ["x"]}'
NAMED = b'{"model": "b"}'
BYTES = b"\0\1"
A, B = "x-lbproxy-model: a\r\n", "x-lbproxy-model: b\r\n"


@asynccontextmanager
async def pool(more: str = SETTINGS) -> AsyncIterator[tuple[ScriptedEndpoint, ScriptedEndpoint, Rig]]:
    """Servers of the models a and b."""
    async with (
        ScriptedEndpoint(answer(b"{}")) as a,
        ScriptedEndpoint(answer(b"{}")) as b,
        rig(a.url, b.url, more=more) as it,
    ):
        for endpoint, model in zip(it.endpoints, "ab", strict=True):
            it.runtime.report_models(endpoint.uid, [card(model)])
        it.tell()
        yield a, b, it


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: lb\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("request_", "to", "target", "body"),
    [
        (post(ONE, "/v2/models/a/infer"), "a", "/v2/models/a/infer", ONE),
        (post(ONE, "/v2/models/b/versions/1/infer?x=1"), "b", "/v2/models/b/versions/1/infer?x=1", ONE),
        (post(NAMED, "/v2/models/a/infer"), "a", "/v2/models/a/infer", NAMED),
        (post(ONE, "/v2/models/alias/infer"), "a", "/v2/models/a/infer", ONE),
        (post(ONE, "/v2/models/down/infer"), "b", "/v2/models/b/infer", ONE),
        (get("/v2/models/b/ready"), "b", "/v2/models/b/ready", b""),
        (post(NAMED, "/predict"), "b", "/predict", NAMED),
        (post(b'{"model": "alias"}', "/predict"), "a", "/predict", b'{"model": "a"}'),
        (post(ONE, "/predict", B), "b", "/predict", ONE),
        (post(ONE, "/predict", "x-lbproxy-model: alias\r\n"), "a", "/predict", ONE),
        (post(NAMED, "/predict", B), "b", "/predict", NAMED),
        (post(BYTES, "/predict", A).replace(b"application/json", b"audio/wav"), "a", "/predict", BYTES),
    ],
)
def test_it_goes_by_the_model_that_the_server_reads(request_: bytes, to: str, target: str, body: bytes) -> None:
    """And nothing is put where the server reads no model: some refuse fields that they do not know."""

    async def main() -> None:
        async with pool() as (a, b, it):
            assert (await it.ask(request_)).status == 200
            (got,) = a.requests + b.requests
            assert got in {"a": a, "b": b}[to].requests
            assert (got.line.split(" ")[1], got.body) == (target, body)
            assert got.field("x-lbproxy-model") is None
            await it.settle()
            (record,) = it.records.requests
            assert (record.route, record.model) == ("custom", to)

    run(main())


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        (post(ONE, "/predict"), 400, b"missing_model"),
        (post(NAMED, "/predict", A), 400, b"x-lbproxy-model"),
        (post(ONE, "/v2/models/a/infer", B), 400, b"x-lbproxy-model"),
        (post(ONE, "/predict", "x-lbproxy-model:\r\n"), 400, b"x-lbproxy-model"),
        (post(ONE, "/v2/models/c/infer"), 404, b"model_not_found"),
        (post(ONE, "/v2/models/a%2Fb/infer"), 404, b"unknown_url"),
        (post(ONE, "/v2//models/a/infer"), 404, b"unknown_url"),
        (post(ONE, "/v2/models/a;b/infer"), 404, b"unknown_url"),
        (post(ONE, "/v2/models/a"), 404, b"unknown_url"),
        (post(ONE, "/Predict"), 404, b"unknown_url"),
        (get("/v2/models/a/../b/infer"), 404, b"unknown_url"),
        (get("/predict", "DELETE"), 405, b"method_not_allowed"),
    ],
)
def test_what_is_refused(request_: bytes, status: int, said: bytes) -> None:
    async def main() -> None:
        async with pool() as (a, b, it):
            reply = await it.ask(request_)
            assert (reply.status, said in reply.body) == (status, True), reply.body
            assert not a.requests + b.requests

    run(main())


def test_without_a_name_it_is_the_only_model_that_is_served() -> None:
    async def main() -> None:
        async with ScriptedEndpoint(answer(b"{}")) as only, rig(only.url, more=SETTINGS) as it:
            assert (await it.ask(post(ONE, "/predict"))).status == 200
            assert only.requests[0].body == ONE

    run(main())


def test_a_client_with_models_of_its_own_names_these_alone() -> None:
    async def main() -> None:
        async with pool(SETTINGS + "\nflows: {default: {models: [a]}}") as (a, b, it):
            for request in (post(ONE, "/v2/models/a/infer"), post(ONE, "/predict", A)):
                assert (await it.ask(request)).status == 200
            assert (await it.ask(post(ONE, "/predict"))).status == 200, "the only one that it may"
            hidden = (post(ONE, "/v2/models/b/infer"), post(NAMED, "/predict"), get("/v2/models/b/ready"))
            for request in (*hidden, post(ONE, "/predict", B)):
                assert b"model_not_found" in (await it.ask(request)).body
            assert (await it.ask(post(NAMED, "/v2/models/a/infer"))).status == 400, (
                "which one its server reads is not known"
            )
            assert (len(a.requests), len(b.requests)) == (3, 0)

    run(main())


def test_no_websocket_is_opened_there() -> None:
    """Its model would be in the query."""

    async def main() -> None:
        more = "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
        async with pool() as (_, _b, it):
            head = get("/v2/models/a/infer")[:-2] + f"Upgrade: websocket\r\n{more}\r\n".encode()
            assert (await it.ask(head)).status == 400

    run(main())


@pytest.mark.parametrize(
    "path",
    [
        *("predict", "/", "/*", "/{model}", "/{model}/infer", "/a/{model}/{model}", "/a/*/b", "/a//b", "/a?b"),
        *("/a/{name}", "/v1/new", "/V1/new", "/generate", "/Generate", "/v2/*", "/v2/{model}", "/inference/*"),
    ],
)
def test_what_is_no_path_of_ones_own(path: str) -> None:
    with pytest.raises(ConfigError, match=r"inference_paths.*: expected a path"):
        parse(f"endpoints: ['http://a:1']\ninference_paths: ['{path}']", environ={})


def test_all_paths_that_are_known_are_refused() -> None:
    assert {path for path in _ROUTES if not path.startswith("/v1/")} <= {*KNOWN_PATHS}
    with pytest.raises(LbError) as raised:
        find_route("POST", "/predict")
    assert raised.value.outcome is Outcome.UNKNOWN_URL
