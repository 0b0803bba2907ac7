# SPDX-License-Identifier: Apache-2.0
"""vLLM's NIXL connector at the simulated server: prefilled KV is held under a lease, and decodes pull it.

What bodies say of it: `transfer/nixl.py`. Servers reach each other over the side channel (`channel.py`) at the
`remote_host` and `remote_port` of the params; a line is good for one request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial

from lbproxy.sim.engine.sequence import LEASE_S, RENEWAL_SHARE, Hold, KvSource, KvState
from lbproxy.sim.mock.apis.call import GenerationCall, PlannedChoice
from lbproxy.sim.mock.apis.fields import Json
from lbproxy.sim.mock.connectors.channel import Channel, ChannelPeer, ReadTimeouts, RemoteKv
from lbproxy.sim.mock.connectors.legs import Leg, ServerConnector, Unasked
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.serving.driver import Driver
from lbproxy.sim.mock.transfer.nixl import NixlParams, Pull, parse, response_params

HANDSHAKE_S = 5.0
"""After which vLLM takes a prefill that does not reply for dead (zmq RCVTIMEO)."""

MAX_ID = 200
"""Characters of a request id of a client's."""


class Nixl(ServerConnector):
    """The connector of one server."""

    def __init__(self, options: MockOptions, driver: Driver) -> None:
        self.options = options
        self.engine_id = secrets.token_hex(16)
        """Another at each start."""
        self.lease_s = LEASE_S if options.kv_lease is None else options.kv_lease
        self.channel = Channel()
        self._driver = driver
        self.held: dict[str, Hold] = {}
        """What is held or will be, by the name under which it may be claimed."""

    async def start(self, host: str) -> None:
        await self.channel.listen(host, self.options.side_channel_port, self._heard, lambda _: None)

    async def close(self) -> None:
        await self.channel.close()

    @property
    def address(self) -> tuple[str, int]:
        """`remote_host` and `remote_port`. vLLM's default host is `localhost`, too."""
        is_any = self.options.host in ("0.0.0.0", "::")  # noqa: S104 - compared
        return "localhost" if is_any else self.options.host, self.channel.port

    def leg(self, fields: Json, call: GenerationCall, request_id: str) -> Leg:
        """A call; those without params are computed here as a whole."""
        params = parse(fields)
        if params is None:
            return Leg(call)
        choices = len(call.prompts) * call.n
        if params.pull is not None:
            return NixlDecodeLeg(self, call, params, choices)
        return NixlPrefillLeg(self, call, request_id, choices) if params.is_prefill else Leg(call)

    def offer(self, name: str) -> Hold:
        """KV that decodes may claim under a name."""
        hold = Hold(self.lease_s)
        hold.changed = partial(self._changed, name, hold)
        self.held[name] = hold
        return hold

    def _changed(self, name: str, hold: Hold) -> None:
        if hold.state is not KvState.HELD:
            self.held.pop(name, None)

    def _heard(self, peer: ChannelPeer, words: list[str]) -> None:
        now = asyncio.get_running_loop().time()
        match words:
            case ["claim", engine_id, name]:
                if engine_id != self.engine_id:
                    peer.say("lost")
                else:
                    peer.name = name
                    peer.say("held" if self._renew(name, now) else "expired")
            case ["beat"]:
                self._renew(peer.name, now)
            case ["done" | "drop"]:
                if peer.name in self.held:
                    self._driver.release(self.held[peer.name])
            case _:
                peer.close()

    def _renew(self, name: str, now: float) -> bool:
        hold = self.held.get(name)
        if hold is None:
            return False
        self._driver.renew(hold, max(hold.expires_at, now + self.lease_s * RENEWAL_SHARE))
        # Its lease may have ended just now.
        return name in self.held


class NixlPrefillLeg(Leg):
    """Its KV is held when it ends."""

    def __init__(self, nixl: Nixl, call: GenerationCall, request_id: str, choices: int) -> None:
        super().__init__(call)
        self._nixl = nixl
        # The id may be the client's: without spaces it is one word on the side channel.
        name = request_id[:MAX_ID].replace(" ", "_")
        self._names = [f"{name}-{index}-{secrets.token_hex(4)}" for index in range(choices)]
        self._holds: dict[int, Hold] = {}
        self._prompt_tokens = 0

    def hold(self, index: int, choice: PlannedChoice) -> Hold:
        """For each choice, though the response tells of the first alone."""
        return self._holds.setdefault(index, self._nixl.offer(self._names[index]))

    def first(self, index: int, choice: PlannedChoice, cached_tokens: int) -> None:
        """Note its length."""
        if index == 0:
            self._prompt_tokens = choice.prompt_tokens

    def params(self, cached: int) -> Json | None:
        """Those of the first choice; None unless it is held."""
        hold = self._holds.get(0)
        if hold is None or hold.state is KvState.LOST:
            return None
        return response_params(
            blocks=hold.blocks,
            engine_id=self._nixl.engine_id,
            request_id=self._names[0],
            address=self._nixl.address,
            tokens=self._prompt_tokens,
            cached=cached,
        )


class _Wrong:
    """The KV of another prompt, which is read without an error."""

    state = KvState.EXPIRED

    def __init__(self, source: RemoteKv) -> None:
        self.recompute = source.recompute
        self._source = source

    def begin(self, *, now: float) -> None:
        """As of the right one."""
        self._source.begin(now=now)

    def finish(self, *, now: float, was_read: bool) -> None:
        """It is read like the right one."""
        self._source.finish(now=now, was_read=was_read)

    def abandon(self, *, now: float) -> None:
        """As of the right one."""
        self._source.abandon(now=now)


class NixlDecodeLeg(Leg):
    """Its KV comes from elsewhere."""

    def __init__(self, nixl: Nixl, call: GenerationCall, params: NixlParams, choices: int) -> None:
        super().__init__(call)
        self.kills = params.pull is Pull.KILLS
        self._params = params
        self._sources: list[RemoteKv] = []
        if params.pull is Pull.READS:
            # Each child of the request pulls the same KV.
            refused_s = HANDSHAKE_S / nixl.options.speed
            self._sources = [self._read(nixl, refused_s) for _ in range(choices)]

    def _read(self, nixl: Nixl, refused_s: float) -> RemoteKv:
        params = self._params
        source = RemoteKv(
            nixl.channel,
            (params.host, params.port),
            ("claim", *(text.replace(" ", "_") for text in (params.engine_id, params.request_id))),
            ReadTimeouts(HANDSHAKE_S, refused_s, nixl.lease_s),
            recompute=nixl.options.kv_load_failure == "recompute",
        )
        # The heartbeats begin when the request is in the queue.
        source.call()
        return source

    def source(self, index: int) -> KvSource:
        """What the params name, for whichever prompt: of a list, all but the first get another one's KV."""
        if not self._sources:
            return Unasked()
        return self._sources[index] if index < self.call.n else _Wrong(self._sources[index])

    def watch(self, index: int, source: KvSource, poke: Callable[[], None]) -> None:
        if isinstance(source, RemoteKv):
            source.changed = poke

    def cached_tokens(self, own: int, received: int) -> int:
        """The prefill's, if the params tell; else all that was not computed here, as of vLLM 0.27 and before."""
        told = self._params.cached_tokens
        return own + received if told is None else told

    def close(self) -> None:
        """Of a call that was refused before the engine had it, the prefill is told at once, too."""
        now = asyncio.get_running_loop().time()
        for source in self._sources:
            source.finish(now=now, was_read=False)
