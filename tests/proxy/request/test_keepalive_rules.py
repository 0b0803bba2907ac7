# SPDX-License-Identifier: Apache-2.0
"""Whose word counts of how long a client's stream may be silent: the request's, its flow's, its model's, the top
level's.
"""

from __future__ import annotations

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.text import ConfigError
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.models import ModelRules
from lbproxy.core.requests.outcome import LbError
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.headers import read_request_fields
from lbproxy.proxy.request.plain import read_plain
from lbproxy.proxy.request.reading import RequestReader
from lbproxy.proxy.request.routes import find_route
from tests.support.aio import run
from tests.support.pool import Pool, make_balancer, spec
from tests.support.rig import post, settings_for

PATH = "/v1/chat/completions"
EVERYWHERE = """
stream_keepalive: 50s
models:
  {big: {stream_keepalive: 40s}, "slow-*": {stream_keepalive: 30s}, near: big, far: {to: big, stream_keepalive: 0}}
flows:
  default: {stream_keepalive: null}
  named: {chat: {stream_keepalive: 20s}, batch: {stream_keepalive: 0}, plain: {weight: 2}, team: {stream_keepalive: 7s}}
"""


def asked(
    settings: str, body: bytes, *fields: tuple[bytes, bytes], key: str | None = None, method: str = "POST"
) -> float:
    """Seconds of silence for a request of HTTP/1.1 with this body."""

    async def main() -> float:
        pool = Pool(make_balancer(), [spec(1)])
        try:
            tree = settings_for([spec(1).base_url], settings)
            reading = RequestReader(tree, pool.runtime, ModelRules(tree.models))
            read = read_request_fields([(b"Host", b"lb"), *fields])
            request = ClientRequest(method, PATH, find_route("POST", PATH), read, body)
            record = RequestRecord("r", method, PATH, "127.0.0.1", 0.0)
            record.key = key
            return reading.interpret(request, record)[0].keepalive_s
        finally:
            pool.connections.close()

    return run(main())


def body_of(model: str) -> bytes:
    return b'{"model":"%b","stream":true}' % model.encode()


@pytest.mark.parametrize(
    ("model", "flow", "header", "expected"),
    [
        ("small", None, None, 50.0),
        ("big", None, None, 40.0),
        ("slow-1", None, None, 30.0),
        ("near", None, None, 40.0),
        ("far", None, None, 0.0),
        ("big", "plain", None, 40.0),
        ("big", "chat", None, 20.0),
        ("big", "batch", None, 0.0),
        ("big", "batch", "15", 15.0),
        ("small", "chat", "0", 0.0),
    ],
)
def test_the_request_goes_before_its_flow_its_model_and_the_top_level(
    model: str, flow: str | None, header: str | None, expected: float
) -> None:
    fields = [] if flow is None else [(b"x-lbproxy-flow", flow.encode())]
    fields += [] if header is None else [(b"X-LBProxy-Keepalive", header.encode())]
    assert asked(EVERYWHERE, body_of(model), *fields) == expected


def test_what_a_key_says_holds_whichever_flow_its_bearer_chooses() -> None:
    settings = EVERYWHERE.replace("flows:", "flows:\n  header: true")
    chat = (b"x-lbproxy-flow", b"chat")
    assert asked(settings, body_of("big"), chat, key="team") == 7.0
    assert asked(settings, body_of("big"), chat, key="other") == 20.0
    assert asked(settings, body_of("big"), key="other") == 40.0


def test_null_in_a_flow_takes_back_what_is_said_for_all() -> None:
    settings = "stream_keepalive: 9s\nflows: {default: {stream_keepalive: 0}, named: {a: {stream_keepalive: null}}}"
    assert asked(settings, body_of("m")) == 0.0
    assert asked(settings, body_of("m"), (b"x-lbproxy-flow", b"a")) == 9.0


def test_without_a_setting_only_who_asks_gets_it() -> None:
    assert asked("", body_of("m")) == 0.0
    assert asked("", body_of("m"), (b"x-lbproxy-keepalive", b"600")) == 600.0
    assert asked("stream_keepalive: 9s", body_of("m"), method="HEAD") == 0.0


@pytest.mark.parametrize("value", ["", "x", "-1", "601", "1.5", "15s", "0x1", "007", "1,2", "99999"])
def test_a_time_that_cannot_be_meant_is_refused_by_name(value: str) -> None:
    with pytest.raises(LbError, match="x-lbproxy-keepalive is 0, or a number of seconds from 1 to 600"):
        read_request_fields([(b"Host", b"lb"), (b"x-lbproxy-keepalive", value.encode())])
    assert read_plain(post(more=f"x-lbproxy-keepalive: {value}\r\n"), 1 << 20) is None, "aiohttp's lane says so"


@pytest.mark.parametrize("value", ["0", "1", "10", "599", "600"])
def test_the_fast_lane_knows_the_header_and_servers_do_not_get_it(value: str) -> None:
    plain = read_plain(post(more=f"X-lbproxy-Keepalive: {value}\r\n"), 1 << 20)
    assert plain is not None
    assert plain.fields.keepalive_s == float(value)
    assert b"keepalive" not in plain.fields.forward.lower()


@pytest.mark.parametrize("value", ["0.5", "999ms", "601s", "11m", "-1", "yes", "[]", "true"])
@pytest.mark.parametrize(
    "where",
    ["stream_keepalive: {}", "models: {{m: {{stream_keepalive: {}}}}}", "flows: {{default: {{stream_keepalive: {}}}}}"],
)
def test_an_interval_is_0_or_1_s_to_10_minutes(where: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"expected 0, or a duration .* from 1s to 10m"):
        parse(f"{where.format(value)}\nendpoints: [http://a:1]\n", environ={})


def test_intervals_are_written_like_other_durations() -> None:
    for value, seconds in (("0", 0.0), ("0s", 0.0), ("1", 1.0), ("1500ms", 1.5), ("2m", 120.0), ("10m", 600.0)):
        tree = parse(f"stream_keepalive: {value}\nendpoints: [http://a:1]\n", environ={})
        assert tree.stream_keepalive == seconds
