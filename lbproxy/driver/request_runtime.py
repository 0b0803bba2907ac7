# SPDX-License-Identifier: Apache-2.0
"""What the data plane needs of the balancer, wherever that runs.

`proxy/` knows this class only. There are two implementations: `runtime.Runtime`, with the Balancer in this process,
and `workers.remote.RemoteRuntime`, which speaks to the balancer process. So a request that was submitted may always
have to wait for `settled`; everything else is decided at once, by what is known here.

An abstract class and not a Protocol: compiled, a call of its methods is one indirect jump, where one of a Protocol's is
a look-up by name.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from lbproxy.core.endpoints.endpoint import Endpoint, EndpointUid
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.serving import Serving
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.engines.orca import LoadReport
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.stored_responses import StoredResponse, StoredResponses
from lbproxy.core.queue.ticket import Ticket
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import InferenceRequest, Usage
from lbproxy.core.requests.retry import FailureKind, UpstreamError, Verdict
from lbproxy.driver.pulse import Pulse


class RequestRuntime(ABC):
    """The balancer, as exchanges see it. All of it runs on one event loop; only `refresh_models` awaits."""

    def __init__(self, serving: Serving, stored_responses: StoredResponses) -> None:
        self.loop = asyncio.get_running_loop()
        # Not loop.time: uvloop's has a resolution of 1 ms, and stands still while the loop is busy.
        self.now: Callable[[], float] = time.monotonic
        self.pulse = Pulse()  # whoever makes the runtime starts it
        self.move_stranded: Callable[[], None] | None = None
        """Called when requests may be stranded (`is_stranded`), so that their exchanges send them elsewhere."""
        self.serving = serving
        """Which endpoints serve which model, and may be asked."""
        self.stored_responses = stored_responses
        """Which endpoint has which response or other object, and after which prompt."""

    # A request

    @abstractmethod
    def submit(
        self,
        request: InferenceRequest,
        record: RequestRecord,
        avoid: frozenset[EndpointUid],
        settled: Callable[[Ticket], None],
        suspect: EndpointUid | None = None,
        again: bool = False,
    ) -> Ticket:
        """A ticket: placed, refused, or waiting; then `settled` is called when it is one of the others, in a later turn
        of the loop. The caller must `close` it.

        `record`: of the request, the same in each attempt. Of the others see `Balancer.submit`; `again` is its
        `resubmitted`.
        """

    @abstractmethod
    def after_failure(self, ticket: Ticket, error: UpstreamError, earlier: Sequence[FailureKind]) -> Verdict:
        """Decide what follows a failed attempt. The caller closes the ticket, unless it relays the response."""

    def _final(self, verdict: Verdict, error: UpstreamError) -> Verdict:
        """The verdict of the rules for retries, and of what is known of the pool."""
        if error.kind is FailureKind.CONNECT and verdict.outcome is Outcome.NO_ENDPOINTS and self.any_up():
            return Verdict(False, Outcome.CONNECT_FAILED)  # a pool that is up failed this request
        return verdict

    @abstractmethod
    def is_stranded(self, ticket: Ticket) -> bool:
        """Whether it waits in vain for a first byte."""

    @abstractmethod
    def first_byte(self, ticket: Ticket) -> None:
        """Report the first byte of the response's body."""

    @abstractmethod
    def progress(self, ticket: Ticket, tokens: int) -> None:
        """Report `tokens` more of the response, as far as known; at most every 250 ms per stream."""

    @abstractmethod
    def answered(self, ticket: Ticket, outcome: Outcome, usage: Usage | None, *, began: bool, now: float) -> None:
        """Report a complete response in one step: its first byte, if it `began` well, and its end."""

    @abstractmethod
    def close(self, ticket: Ticket, outcome: Outcome, usage: Usage | None = None, *, timed_out: bool = False) -> None:
        """Report the end of the attempt. The first call counts; there is no callback. `timed_out`: see Balancer."""

    @abstractmethod
    def emit(self, record: RequestRecord) -> None:
        """A request is over: once per request, whether or not it was submitted."""

    # What its response shows

    @abstractmethod
    def report_load(self, ticket: Ticket, report: LoadReport | None) -> None:
        """Report a load report from a response; None = it was malformed."""

    def stores(self, ticket: Ticket, response_id: str) -> None:
        """The endpoint of a placed request stores its response, or another object, and gave it this id."""
        uid = ticket.placed_state.endpoint.uid
        self.stored_responses.remember(response_id, uid, ticket.request, now=self.now())

    def stored(self, response_id: str) -> StoredResponse | None:
        """What is known of a response or another object; None: nobody knows of it."""
        return self.stored_responses.find(response_id, now=self.now())

    # Endpoints and models

    def any_up(self) -> bool:
        """Whether an endpoint takes requests, or may be woken for them."""
        return bool(self.serving.candidates(None) or self.serving.dormant)

    def takes_longer(self, ticket: Ticket) -> bool:
        """Whether another endpoint, awake or not, is known to take longer prompts than the one at which a request is
        placed.
        """
        request, state = ticket.request, ticket.placed_state
        limit = state.prompt_limit(request)
        if limit is None or (request.response_id is not None and self.stored(request.response_id) is not None):
            return False
        tried = {state.endpoint.uid, *ticket.avoid}
        asleep = [one for one in self.serving.dormant.serving(request.model) if one.endpoint.tier <= request.max_tier]
        others = chain(asleep, *self.serving.by_tier(request.model, request.max_tier))
        return any((one.prompt_limit(request) or 0) > limit for one in others if one.endpoint.uid not in tried)

    def as_short(self, ticket: Ticket) -> frozenset[EndpointUid]:
        """The endpoints that are known to take no longer prompts than the one at which a request is placed."""
        request, most = ticket.request, ticket.placed_state.prompt_limit(ticket.request) or 0
        limits = [(one.endpoint.uid, one.prompt_limit(request)) for one in self.members()]
        return frozenset(uid for uid, limit in limits if limit is not None and limit <= most)

    @abstractmethod
    def members(self) -> Iterable[EndpointState]:
        """All endpoints of the set, in the order of the settings."""

    def endpoints_of(self, model: str) -> list[tuple[Endpoint, Health]]:
        """All servers of tier 1 that list a model, whatever their health, except those that are draining: one rank of
        each.
        """
        here = [one for one in self.members() if one.endpoint.tier == 1 and model in (one.models or ())]
        return list({one.endpoint.url_key: (one.endpoint, one.health) for one in here if not one.draining}.values())

    def count_draining(self, model: str | None) -> int:
        """Endpoints that are draining, of those that list `model` or have not listed any."""
        of_it = (one for one in self.members() if model is None or one.models is None or model in one.models)
        return sum(one.draining for one in of_it)

    @property
    @abstractmethod
    def block_bytes(self) -> int | None:
        """Into blocks of how many bytes prompts have to be hashed; None = they need not be read at all."""

    @property
    @abstractmethod
    def splits(self) -> bool:
        """Whether prefill and decode are apart: some endpoint has a role."""

    def lists(self, model: str | None) -> bool:
        """Whether an endpoint that is up lists `model`."""
        return any(card.id == model for card in self.serving.model_cards())

    @abstractmethod
    def look_for_models(self, looked: Callable[[], None]) -> bool:
        """A request names a model that no endpoint listed: ask all of them again, unless that was done of late.

        Returns whether that goes on; then `looked` is called when it is over.
        """

    @abstractmethod
    def doubt_models(self, uid: EndpointUid) -> None:
        """An endpoint does not serve what it listed: have it asked soon."""

    @abstractmethod
    async def refresh_models(self, uid: EndpointUid) -> None:
        """Ask an endpoint for its models now. Returns when it has responded, or failed."""
