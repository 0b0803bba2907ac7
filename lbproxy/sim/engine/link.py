# SPDX-License-Identifier: Apache-2.0
"""Prefill at one engine, decode at another, in one process and one clock: for fleets in virtual time.

How to drive it, besides the engines themselves (`engine.py`), for any number of engines that share a `KvLink`:

1. `hold = link.prefill(p, request, now=...)`. Engine `p` is to compute the prompt: its `advance` names the request in
   `StepDone.first` and `finished` when it is prefilled, as any other. `hold.state` is then HELD, for `lease_s`.
2. `link.decode(d, request, hold, now=...)`, after that (as with NIXL) or before it (as with SGLang: then the transfer
   begins when the prefill ends). Engine `d` reports it like any other; `FirstToken.received_tokens` is what was
   transferred, `FirstToken.garbage` says that the lease had ended before. If the KV is lost, because `p` failed or the
   prefill was aborted, the request is named in `StepDone.failed` instead. While it waits at `d`, the lease is renewed.
3. `abort` of either engine, by the id of the request there. A decode that has not read yet frees the KV at `p`; a
   prefill that was aborted is never held, and one that has ended is not aborted any more: `drop(hold)` frees it.
4. After every call of an engine's `advance`, `abort` or `restart`, and of the link's own: `settle(now=...)`. It passes
   on what one engine has done to the other, and names the engines whose `next_event` may have changed.

A request has one id at both engines, or two; two engines may be the same one.
"""

from __future__ import annotations

from dataclasses import replace

from lbproxy.sim.engine.model_server import ModelServer
from lbproxy.sim.engine.sequence import LEASE_S, RENEWAL_SHARE, Hold, KvState, SimRequest


class _Reader:
    """The source of one request that decodes: what is held for it elsewhere."""

    def __init__(self, link: KvLink, hold: Hold, engine: ModelServer, request_id: str, *, recompute: bool) -> None:
        self.recompute = recompute
        self.hold = hold
        self.engine = engine
        """Where it decodes."""
        self.request_id = request_id
        self._link = link

    @property
    def state(self) -> KvState:
        """That of what is held."""
        return self.hold.state

    def begin(self, *, now: float) -> None:
        """The lease is renewed already."""

    def finish(self, *, now: float, was_read: bool) -> None:
        """Read, or not wanted."""
        self._link.read(self)

    def abandon(self, *, now: float) -> None:
        """The heartbeats end with the engine that sent them."""
        self._link.read(self, expires_at=now + self.hold.lease_s * RENEWAL_SHARE)


class KvLink:
    """One for all engines of a fleet that hand over KV to one another."""

    def __init__(self) -> None:
        self._holders: dict[Hold, ModelServer] = {}
        """The engine that holds it, or is to."""
        self._readers: dict[Hold, dict[_Reader, None]] = {}
        self._over: dict[Hold, float | None] = {}
        """What was read since the last `settle`; or when its lease ends, because its reader failed."""
        self._changed: dict[Hold, None] = {}

    def prefill(self, engine: ModelServer, request: SimRequest, *, now: float, lease_s: float = LEASE_S) -> Hold:
        """Have a prompt computed, and its KV held. Raises `RequestTooLong`."""
        hold = Hold(lease_s)
        hold.changed = lambda: self._changed.update({hold: None})
        engine.add(replace(request, output_tokens=1, hold=hold), now=now)
        self._holders[hold] = engine
        return hold

    def decode(
        self, engine: ModelServer, request: SimRequest, hold: Hold, *, now: float, recompute: bool = False
    ) -> None:
        """Have a response computed from what is held. `recompute`: if it is lost, the engine computes the prompt
        itself instead of failing the request. Raises `RequestTooLong`, having freed what is held.
        """
        reader = _Reader(self, hold, engine, request.id, recompute=recompute)
        if hold in self._holders:
            self._holders[hold].renew(hold, float("inf"), now=now)
        self._readers.setdefault(hold, {})[reader] = None
        try:
            engine.add(replace(request, source=reader), now=now)
        except ValueError:
            self.read(reader)
            raise

    def drop(self, hold: Hold, *, now: float) -> None:
        """Nobody is going to read it: it is freed, now or as soon as it is computed."""
        if hold in self._holders:
            self._holders[hold].release(hold, now=now)

    def read(self, reader: _Reader, expires_at: float | None = None) -> None:
        """For a reader: it needs the KV no more. What is held is freed, or its lease ends `expires_at`."""
        readers = self._readers.get(reader.hold, {})
        readers.pop(reader, None)
        if not readers:
            self._readers.pop(reader.hold, None)
        self._over[reader.hold] = expires_at

    def settle(self, *, now: float) -> list[ModelServer]:
        """Tell each engine what others have done. Returns those that were told, each once."""
        told: dict[int, ModelServer] = {}
        while self._over or self._changed:
            over, self._over = self._over, {}
            for hold, expires_at in over.items():
                holder = self._holders.get(hold)
                if holder is None:
                    continue
                told[id(holder)] = holder
                if expires_at is None:
                    holder.release(hold, now=now)
                else:
                    holder.renew(hold, expires_at, now=now)
            changed, self._changed = self._changed, {}
            for hold in changed:
                if hold.state is not KvState.HELD:
                    self._holders.pop(hold, None)
                for reader in list(self._readers.get(hold, ())):
                    told[id(reader.engine)] = reader.engine
                    reader.engine.poke(reader.request_id, now=now)
        return list(told.values())
