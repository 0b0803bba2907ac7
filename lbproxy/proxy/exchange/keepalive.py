# SPDX-License-Identifier: Apache-2.0
"""Signs of life for the client of an event stream that is silent: in the queue, during a wake, in a long prefill.

Whoever is in front of lbproxy (a load balancer, a CDN, the client) takes a connection for dead that is silent for a
minute or two. So with `stream_keepalive` each silence of that length ends with a comment, which no client takes for an
event, or in /v1/messages with `ping`, as in Anthropic's API. A client that has no head by then, and is certain to get a
stream, is sent one of lbproxy's own, which says nothing that only an endpoint decides. From then on it is like one that
has the head of an endpoint's stream and nothing of its body (proxy.exchange.relay). Invariants:

- Nothing is sent before the first interval, within an event, to a client that does not read, or in place of a response
  that may be no stream.
- It is no byte of a response: it commits nothing and stops no clock of an attempt, and retries go on.

Each request has one timer, and an event costs nothing: since when the endpoint is silent is known to within
`relay.PROGRESS_S`, by which a comment may be early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from lbproxy.core.queue.ticket import Ticket
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.proxy.exchange.relay import Relay, RequestOwner, chunk
from lbproxy.proxy.request.own_responses import rate_fields, stream_head

COMMENT: Final = b": keep-alive\n\n"
PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
_EARLY_S: Final = 0.001
"""So much before its time a timer may be called."""


class Keepalive:
    """Of one request, from the moment that it is complete. `stop` it at the end."""

    client_reusable = False
    is_ours, has_moved = True, False

    def __init__(self, exchange: RequestOwner, runtime: RequestRuntime, ticket: Callable[[], Ticket | None]) -> None:
        """`ticket`: that of its present attempt."""
        request = exchange.request
        self._exchange, self._runtime, self._ticket = exchange, runtime, ticket
        self._every_s = request.keepalive_s
        self._words = chunk(PING if request.route.name == "messages" else COMMENT)
        self._is_certain = exchange.placed.stream and request.method == "POST" and request.route.flatten is not None
        """Its response is an event stream, or an error."""
        self._spoke_at = runtime.now()
        self._timer = runtime.loop.call_later(self._every_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        """Has it been silent for so long?"""
        now, relay = self._runtime.now(), self._exchange.relay
        since = self._spoke_at if relay is None else max(self._spoke_at, relay.silent_since)
        left_s = since + self._every_s - now
        if left_s <= _EARLY_S:
            self._spoke_at, left_s = now, self._every_s
            self._speak(relay)
        self._timer = self._runtime.loop.call_later(left_s, self._look)

    def _speak(self, relay: Relay | None) -> None:
        exchange, transport = self._exchange, self._exchange.client.transport
        if transport is None or transport.is_closing() or exchange.client.writing_paused:
            return
        if relay is not None:
            relay.say(self._words)
        elif exchange.head_sent_by is not None or self._is_certain:
            data = self._words if exchange.head_sent_by is not None else self._head() + self._words
            exchange.record.response_bytes += len(data)
            transport.write(data)

    def _head(self) -> bytes:
        exchange = self._exchange
        self.client_reusable = exchange.keep_alive
        exchange.record.status = 200
        exchange.head_sent(self)
        fields = f"x-request-id: {exchange.record.request_id}\r\n{exchange.cors}"
        fields += rate_fields(self._ticket(), exchange.request.route.name, self._runtime.now())
        return stream_head(fields, keep_alive=exchange.keep_alive)
