# SPDX-License-Identifier: Apache-2.0
"""The first leg of a split request: prefill, and what it hands over to decode.

The exchange places both legs and sends the second one; this sends the first, by the connector's contract
(docs/decisions/0041):

    nixl, shared-storage    first leg; then `RequestOwner.prefilled`, and the second leg with what it returned
    mooncake, sglang        both at once: `RequestOwner.second_ready`, then the response of the first leg matters only
                            if it fails. With Mooncake prefill is asked for its engine's id before, once a process

A first leg that the endpoint refuses as wrong (400, 404, ...) is no verdict on the request: the body is not the
client's. With a serial connector the request is then served whole; with a concurrent one its refusal is the response,
as decode waits for it in vain. Prefill keeps what nobody fetched until a time-out (NIXL: 30 s): `abandon` has a decode
endpoint fetch and drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.observed.trace import Trace
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.request import DECODE, PREFILL, InferenceRequest
from lbproxy.core.requests.retry import FailureKind, UpstreamError, status_failure
from lbproxy.net.connections.call import Call, Called, Result
from lbproxy.net.connections.h1 import request_head
from lbproxy.net.connections.patience import ClockLimits
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.exchange.exchanger import Exchanger
from lbproxy.proxy.exchange.relay import RequestOwner
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.legs import (
    MAX_HANDOVER_BYTES,
    NIXL_FIRST,
    Bodies,
    first_usage,
    mooncake_first,
    mooncake_second,
    nixl_second,
    read_engine_ids,
    sglang_rooms,
)
from lbproxy.proxy.request.reading import as_named_by

USABLE_S: Final = 10.0
"""How long after prefill another decode endpoint may be sent there: a third of vLLM's `kv_lease_duration`. Later
prefill may have freed the blocks, and decode would read another request's without an error."""
MIN_LEFT_S: Final = 1.0
"""What the second leg has of `timeouts.first_byte` at least, however long the first took."""
RELEASE_S: Final = 0.2
"""After so long a decode endpoint has read the request that is to be dropped there."""


class FirstLeg(NamedTuple):
    """What a first leg needs of its request."""

    request: ClientRequest
    placed: InferenceRequest
    id: str
    forwarded: bytes
    """Field lines about the client."""
    trace: Trace | None


class SplitRequest:
    """One request that is split, from the placement of its first leg."""

    def __init__(self, shared: Exchanger, ticket: Ticket, leg: FirstLeg, owner: RequestOwner) -> None:
        """`ticket`: of the first leg."""
        state = ticket.placed_state
        assert state.handover.how is not None
        assert state.handover.connector is not None
        self.endpoint: Endpoint = state.endpoint
        self.request: ClientRequest = as_named_by(state.endpoint, leg.request).in_one_piece()
        """The second leg, once it can be sent."""
        self._shared, self._leg, self._owner = shared, leg, owner
        self._state: EndpointState = state
        self._is_concurrent = state.handover.how.concurrent
        self._bodies: Bodies | None = None
        self._call: Call | None = None
        self._prefilled_at: float | None = None
        self._holds = False
        """Prefill holds what this handed over, for the second leg alone."""
        self._began_at = shared.runtime.now()
        self._second_sent = False
        """A decode endpoint may have fetched it."""
        self._trusts = False
        """The second leg names an engine as it was known from an earlier request."""

    def start(self) -> bool:
        """Send the first leg. False: the request cannot be split after all."""
        try:
            self._bodies = Bodies(self.request.route.name, self.request.body)
        except ValueError:
            return False
        match self._state.handover.connector:
            case "nixl":
                self._send(self._bodies.first(NIXL_FIRST))
            case "shared-storage":
                self._send(self._bodies.first(None))
            case "sglang":
                self._meet(self._bodies)
            case _:
                self._ask_engine(self._bodies)
        return True

    def second(self) -> InferenceRequest:
        """The second leg, as the balancer sees it."""
        return self._leg.placed.as_leg(DECODE, self.endpoint.uid)

    @property
    def can_continue(self) -> bool:
        """Whether a second leg that was not sent may be placed anew: prefill still has what it handed over."""
        at = self._prefilled_at
        return at is not None and not self._second_sent and self._shared.runtime.now() - at < USABLE_S

    @property
    def is_handed_over(self) -> bool:
        """The second leg was sent, with what a first leg before it had handed over."""
        return self._second_sent and self._prefilled_at is not None and not self._is_concurrent

    def send_second(self) -> tuple[ClientRequest, ClockLimits]:
        """The second leg is sent now: the request, and its limits, which are those of both legs together."""
        self._second_sent = True
        limits = self._shared.limits
        left_s = limits.response_s - (self._shared.runtime.now() - self._began_at)
        return self.request, limits._replace(response_s=max(MIN_LEFT_S, left_s))

    def forget_bodies(self) -> None:
        """No leg is sent again."""
        self._bodies = None
        self.request = self.request._replace(body=b"")
        self._leg = self._leg._replace(request=self.request)

    def doubt(self) -> bool:
        """A leg failed: the first server may be another process now, which is asked again before the next request.
        Returns whether the failure may be because of that, so that it shows nothing of the second server.
        """
        self._shared.engine_ids.pop(self.endpoint.base_url, None)
        return self._trusts

    def cancel(self) -> None:
        """End the first leg, if it runs: its endpoint stops at once."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def abandon(self, decode: Endpoint | None) -> None:
        """The request ends here. If prefill holds what nobody fetched, `decode` is to free it."""
        self.cancel()
        if not (self._holds and self.can_continue) or decode is None:
            return
        self._holds = False
        shared = self._shared
        origin = Origin.parse(decode.base_url, decode.tls, decode.proxy)
        call = Call(shared.connections, origin, shared.limits, MAX_HANDOVER_BYTES, _ignore)
        leg = self._leg
        head = self.request.head_for(decode, f"{leg.id}.0", leg.forwarded, max_tier=leg.placed.max_tier)
        call.start("POST", head, self.request.body)
        shared.runtime.loop.call_later(RELEASE_S, call.cancel)

    # The connectors

    def _send(self, body: bytes) -> None:
        """Send the first leg."""
        endpoint, request = self.endpoint, self.request._replace(body=body)
        leg = self._leg
        head = request.head_for(endpoint, leg.id, leg.forwarded, trace=leg.trace, max_tier=leg.placed.max_tier)
        self._begin_call(Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy), head, body, self._responded)

    def _begin_call(self, origin: Origin, head: bytes, body: bytes, done: Callable[[Result], None]) -> None:
        shared = self._shared
        guarded = lambda result: self._owner.guarded(done, result)  # noqa: E731
        self._call = Call(shared.connections, origin, shared.limits, MAX_HANDOVER_BYTES, guarded)
        self._call.start("POST" if body else "GET", head, body)

    def _meet(self, bodies: Bodies) -> None:
        """SGLang: the same body to both, with the place where they meet."""
        endpoint, state = self.endpoint, self._state
        host = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy)[0]
        ranks = len(state.at_address)
        rooms = sglang_rooms(host, state.handover.bootstrap_port, endpoint.rank, ranks, self._shared.rng)
        body = bodies.with_fields(rooms)
        self.request = self.request._replace(body=body)
        self._send(body)
        self._owner.second_ready()

    def _ask_engine(self, bodies: Bodies) -> None:
        """Mooncake: decode needs the id of prefill's engine."""
        process, ids = self._shared.engine_ids.get(self.endpoint.base_url, (-1, {}))
        if process == self._state.standing.process:
            self._trusts = True
            self._transfer(bodies, ids)
            return
        origin = self._bootstrap()
        self._begin_call(origin, request_head("GET", "/query", origin.host_field, b"", 0), b"", self._engine_known)

    def _bootstrap(self) -> Origin:
        host = Origin.parse(self.endpoint.base_url, self.endpoint.tls, self.endpoint.proxy)[0]
        return Origin((host, self._state.handover.bootstrap_port))

    def _engine_known(self, result: Result) -> None:
        self._call = None
        if isinstance(result, UpstreamError):
            self._owner.first_failed(result)
            return
        ids = read_engine_ids(result.body) if result.head.status == 200 else {}
        if (self.endpoint.rank or 0) not in ids:
            text = f"{self._bootstrap()}/query: no engine id"
            self._owner.first_failed(UpstreamError(FailureKind.PROTOCOL, text))
            return
        self._shared.engine_ids[self.endpoint.base_url] = self._state.standing.process, ids
        assert self._bodies is not None
        self._transfer(self._bodies, ids)

    def _transfer(self, bodies: Bodies, ids: Mapping[int, str]) -> None:
        transfer_id = f"xfer-{self._leg.id}-{self._shared.rng.getrandbits(64):016x}"
        engine_id = ids[self.endpoint.rank or 0]
        params = mooncake_second(transfer_id, self._bootstrap().url, engine_id)
        self.request = self.request._replace(body=bodies.second(params))
        self._send(bodies.first(mooncake_first(transfer_id), min_tokens=1))
        self._owner.second_ready()

    # The response of the first leg

    def _responded(self, result: Result) -> None:
        self._call = None
        if isinstance(result, Called) and (status := result.head.status) >= 401:
            kind = status_failure(status, own_key=self.endpoint.api_key is not None, is_inference=True)
            if kind is not None and kind is not FailureKind.MISSING:
                result = UpstreamError(kind, f"prefill returned {status}")
        if isinstance(result, UpstreamError):
            self.doubt()
            self._owner.first_failed(result)
        elif not 200 <= result.head.status < 300:
            self._owner.first_refused(result.head, result.body)
        elif self._is_concurrent:
            self._owner.prefilled(first_usage(result.body))
        else:
            self._hand_over(result.body)

    def _hand_over(self, body: bytes) -> None:
        assert self._bodies is not None
        if self._state.handover.connector == "nixl":
            params = nixl_second(body)
            self._holds = params is not None
            self.request = self.request._replace(body=self._bodies.second(params))
        self._prefilled_at = self._shared.runtime.now()
        self._owner.prefilled(first_usage(body))


def first_leg(ticket: Ticket) -> Ticket | None:
    """The ticket of the first leg that begins with a placed ticket; None: it is no first leg."""
    if ticket.prefill is not None:
        return ticket.prefill
    return ticket if ticket.request.leg == PREFILL else None


def _ignore(_: Result) -> None:
    """What is dropped needs no response."""


def decode_endpoint(ticket: Ticket | None) -> Endpoint | None:
    """Where the second leg of a request is placed, if it is."""
    if ticket is None or ticket.request.leg != DECODE or ticket.placed_on is None:
        return None
    return ticket.placed_on.endpoint
