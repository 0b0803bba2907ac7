# SPDX-License-Identifier: Apache-2.0
"""The calls that put a server to sleep and wake it, as vLLM has them (docs/decisions/0045), and the one to a webhook.

Each is bounded in time and size. Those that change something return what went wrong, or None.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import orjson

from lbproxy.core.endpoints.endpoint import ColdStart, Endpoint
from lbproxy.core.engines.server_info import STATE_PATH, is_silent, read_state
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.fetch import bearer, fetch, send
from lbproxy.net.connections.h1 import request_head
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.origin import Origin

MAX_BYTES: Final = 64 << 10
ASK_S: Final = 5.0
"""For the question whether it sleeps: an engine answers between two steps, and not while it wakes."""
WAKE_S: Final = 600.0
"""For a wake: the weights of a large model come from a slow disk, with `sleep_level: 2`."""
SLEEP_S: Final = 60.0
SLEEP_TRIES: Final = 10
"""An engine finishes what it computes before it sleeps. The call is repeated: it waits for the same end again."""
HOOK_S: Final = 30.0
_RELOAD: Final = b'{"method": "reload_weights"}'


class SleepReport(NamedTuple):
    """What a server said of itself."""

    heard: bool
    """False: it said nothing, which may change any time."""
    asleep: bool | None
    """None: it cannot say."""
    reason: str


async def ask_state(endpoint: Endpoint, connections: ConnectionPool) -> SleepReport:
    """Whether it sleeps."""
    origin = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy)
    try:
        got = await fetch(connections, origin, STATE_PATH, timeout_s=ASK_S, max_bytes=MAX_BYTES, key=endpoint.api_key)
    except UpstreamError as error:
        is_answer = error.kind is FailureKind.PROTOCOL
        return SleepReport(is_answer, None, error.detail)
    reason = f"GET {STATE_PATH} returned {got.status}"
    return SleepReport(not is_silent(got.status), read_state(got.status, got.body), reason)


async def put_to_sleep(endpoint: Endpoint, connections: ConnectionPool) -> str | None:
    """Returns when it sleeps. What it still computes, for others too, is finished first: `mode=wait`."""
    assert endpoint.sleep is not None
    path = f"/sleep?level={endpoint.sleep.level}&mode=wait"
    for _ in range(SLEEP_TRIES):
        try:
            return await _post(endpoint, path, connections, SLEEP_S)
        except UpstreamError as error:
            if error.kind is not FailureKind.TIMEOUT:
                return error.detail
    return f"it did not fall asleep within {SLEEP_S * SLEEP_TRIES:.0f} s"


async def wake(endpoint: Endpoint, connections: ConnectionPool) -> str | None:
    """Returns when it is awake, and says so itself."""
    assert endpoint.sleep is not None
    steps = [("/wake_up", b"")]
    if endpoint.sleep.level == 2:  # it has space for its weights first, reads them, and only then serves
        steps = [("/wake_up?tags=weights", b""), ("/collective_rpc", _RELOAD), ("/wake_up?tags=kv_cache", b"")]
    try:
        for path, body in steps:
            problem = await _post(endpoint, path, connections, WAKE_S, body)
            if problem is not None:
                return problem
    except UpstreamError as error:
        return error.detail
    state = await ask_state(endpoint, connections)
    return "it was woken, and says that it sleeps" if state.asleep else None


async def start(
    endpoint: Endpoint, hook: ColdStart, model: str | None, waiting: int, connections: ConnectionPool
) -> str | None:
    """Returns when the webhook has accepted: the server is not up then."""
    origin = Origin.parse(hook.url)
    path = "/" + hook.url.split("/", 3)[3] if hook.url.count("/") > 2 else "/"
    body = orjson.dumps({"endpoint": endpoint.name, "url": endpoint.base_url, "model": model, "waiting": waiting})
    fields = _FIELDS if hook.token is None else _FIELDS + bearer(hook.token)
    head = request_head("POST", path, origin.host_field, fields, len(body))
    try:
        got = await send(connections, origin, "POST", head, body, timeout_s=HOOK_S, max_bytes=MAX_BYTES)
    except UpstreamError as error:
        return f"the webhook: {error.detail}"
    return None if 200 <= got.status < 300 else f"the webhook returned {got.status}"


async def _post(
    endpoint: Endpoint, path: str, connections: ConnectionPool, timeout_s: float, body: bytes = b""
) -> str | None:
    """Raises UpstreamError."""
    origin, key = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy), endpoint.api_key
    fields = _FIELDS if key is None else _FIELDS + bearer(key)
    head = request_head("POST", path, origin.host_field, fields, len(body))
    got = await send(connections, origin, "POST", head, body, timeout_s=timeout_s, max_bytes=MAX_BYTES)
    return None if got.status == 200 else f"POST {path} returned {got.status}"


_FIELDS: Final = b"Accept: */*\r\nContent-Type: application/json\r\nUser-Agent: lbproxy\r\n"
