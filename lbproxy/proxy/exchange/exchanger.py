# SPDX-License-Identifier: Apache-2.0
"""What exchanges share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Final

from lbproxy.config.sections.engines import LBPROXY
from lbproxy.config.tree import Settings
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.engines.orca import read_field
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.explain import compact
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.models import ModelRules
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.connections.h1 import ResponseHead
from lbproxy.net.connections.patience import ClockLimits
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.above import as_ours, host_of
from lbproxy.net.dialing.origin import Origin
from lbproxy.proxy.exchange.used import UsedTokens
from lbproxy.proxy.request.own_responses import rate_fields

LARGE_BODY_BYTES: Final = 16 << 10
"""A smaller body is neither counted nor released before its request ends: the other objects of a request cost as much,
and all of them are bounded by the number of connections."""


class Exchanger:
    """What exchanges under the same settings share. A request is served under one settings tree to its end."""

    def __init__(
        self,
        settings: Settings,
        runtime: RequestRuntime,
        connections: ConnectionPool,
        used: UsedTokens | None = None,
    ) -> None:
        self.runtime = runtime
        self.connections = connections
        self.settings = settings
        self.model_rules = ModelRules(settings.models)
        limits = settings.timeouts
        self.limits = ClockLimits(limits.connect, limits.first_byte, limits.stream_idle)
        self.rng = random.Random()  # noqa: S311 - numbers that must differ, not secrets
        self.engine_ids: dict[str, tuple[int, Mapping[int, str]]] = {}
        """With connector mooncake: the ids of a prefill server's engines by their ranks, by its URL; and which process
        said so (`EndpointState.process`)."""
        self.used = used or UsedTokens()
        self.asks_usage = settings.usage.ask != "never"
        self.expose_endpoint = settings.expose_endpoint
        self.explain_header = settings.explain.header and settings.expose_endpoint

    def with_settings(self, settings: Settings) -> Exchanger:
        """The same under other settings, for new exchanges."""
        return Exchanger(settings, self.runtime, self.connections, self.used)

    def note_load_report(self, head: ResponseHead, ticket: Ticket, *, wanted: bool) -> ResponseHead:
        """Report the endpoint's load. Only clients that asked for it get it."""
        self.runtime.report_load(ticket, read_field(head.load_report))
        if wanted:
            head.end_to_end += head.load_report
            head.may_name = True
        return head

    def conceal(self, head: ResponseHead, endpoint: Endpoint) -> None:
        """Take the endpoint's address out of a head for a client. Of another lbproxy the reason of an error passes."""
        if head.refers or (head.may_name and head.end_to_end.lower().find(host_of(endpoint.base_url)) >= 0):
            head.end_to_end = as_ours(head.end_to_end, endpoint.base_url)
        if head.reason and endpoint.engine == LBPROXY:
            head.end_to_end += head.reason

    def hint(self, head: ResponseHead, ticket: Ticket, transport: asyncio.Transport | None) -> None:
        """Pass on what an endpoint says before its response."""
        if transport is not None and not transport.is_closing():
            self.conceal(head, ticket.placed_state.endpoint)
            transport.write(b"HTTP/1.1 103 Early Hints\r\n%b\r\n" % head.end_to_end)

    def own_fields(self, record: RequestRecord, cors: str, ticket: Ticket | None, *, explain: bool) -> str:
        """lbproxy's own field lines in a response, each with its CRLF.

        `cors`: field lines about origins, which go first. `explain`: the client asks for an explanation of the routing
        decision.
        """
        always = f"{cors}x-request-id: {record.request_id}\r\nx-lbproxy-attempts: {record.attempts}\r\n"
        if record.fallback_from is not None:
            always += f"x-lbproxy-model: {_ascii(record.model)}\r\n"
        if ticket is not None and ticket.flow is not None and ticket.flow.limited:
            always += rate_fields(ticket, record.route, self.runtime.now())
        if not self.expose_endpoint:
            return always
        fields = f"{always}x-lbproxy-endpoint: {record.endpoint}\r\n"
        if record.tier > 1:
            fields += f"x-lbproxy-tier: {record.tier}\r\n"
        if record.prefill is not None:
            fields += f"x-lbproxy-prefill: {record.prefill}\r\n"
        if not explain or not self.explain_header:
            return fields
        made = record.attempt_decision
        explanation = record.explanation if made is None else compact(made)
        if explanation is None:
            return fields
        if record.fallback_from is not None:
            explanation += f"; fallback_from={_ascii(record.fallback_from)}"
        return f"{fields}x-lbproxy-explain: {explanation}; queue_ms={1000.0 * record.queue_s:.1f}\r\n"


def _ascii(model: str | None) -> str:
    return (model or "").encode("ascii", "backslashreplace").decode("ascii")


def origin_of(ticket: Ticket) -> Origin:
    """Where a placed request is sent."""
    endpoint = ticket.placed_state.endpoint
    return Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy)
