# SPDX-License-Identifier: Apache-2.0
"""What a connector adds to a call: KV that is to be held when it ends, KV that comes from elsewhere, and the words for
both. A server without a connector has `ServerConnector` itself, which adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from lbproxy.sim.engine.sequence import Hold, KvSource, KvState
from lbproxy.sim.mock.apis.call import GenerationCall, PlannedChoice
from lbproxy.sim.mock.apis.fields import Json


class Leg:
    """One call, from its arrival to its last byte."""

    kills = False
    """The engine does not survive it."""

    def __init__(self, call: GenerationCall) -> None:
        self.call = call
        """As the engine is to have it."""

    def rank(self, named: int | None) -> int | None:
        """The data-parallel rank that computes it. `named`: by the client."""
        return named

    def hold(self, index: int, choice: PlannedChoice) -> Hold | None:
        """For one of its choices: the KV is to be held at its end."""
        return None

    def source(self, index: int) -> KvSource | None:
        """For one of its choices: where its KV comes from."""
        return None

    def watch(self, index: int, source: KvSource, poke: Callable[[], None]) -> None:
        """The engine has the choice: call `poke` when the state of its source changes."""

    def first(self, index: int, choice: PlannedChoice, cached_tokens: int) -> None:
        """A choice is prefilled, with so much of it found here."""

    def cached_tokens(self, own: int, received: int) -> int:
        """What the usage says was cached: `own` found here, `received` from elsewhere, of all prompts."""
        return own + received

    def params(self, cached: int) -> Json | None:
        """`kv_transfer_params` of the response, which is complete."""
        return None

    async def ready(self) -> None:
        """Wait until the engine may begin. Raises ApiError."""

    async def transferred(self) -> None:
        """The engine is done: wait until the response may go out. Raises ApiError."""

    def close(self) -> None:
        """The call has ended, in whichever way: nothing of it is wanted any more that the engine was not given."""


class Unasked:
    """A source for which nobody is asked, and that tells nobody. It never has anything, unless `state` says so."""

    recompute = False

    @property
    def state(self) -> KvState:
        return KvState.PENDING

    def begin(self, *, now: float) -> None: ...

    def finish(self, *, now: float, was_read: bool) -> None: ...

    def abandon(self, *, now: float) -> None: ...


class ServerConnector:
    """One server's."""

    async def start(self, host: str) -> None:
        """Listen to other servers. Raises OSError."""

    async def close(self) -> None:
        """Stop that."""

    def leg(self, fields: Json, call: GenerationCall, request_id: str) -> Leg:
        """A call that has arrived with this body. Raises ApiError."""
        return Leg(call)

    def queues(self) -> dict[str, int]:
        """Families of the metrics page that only the connector knows, by the end of their name."""
        return {}

    @property
    def address(self) -> tuple[str, int] | None:
        """Where other servers reach this one; None = nowhere."""
        return None
