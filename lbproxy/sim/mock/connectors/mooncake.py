# SPDX-License-Identifier: Apache-2.0
"""vLLM's Mooncake connector at the simulated server: the halves of a request meet by the `transfer_id` that it has, in
either order (docs/decisions/0041, section 4).

A prefill shows at its bootstrap port, over HTTP, where its worker is, which is its side channel (`channel.py`). A
decode asks there as soon as it has space for the KV, and then waits at the worker: for a prefill that fails, too, and
for one that never comes, as it is told nothing of either. A wrong role kills the engine, a missing field hangs the
request. Values of the wrong type are refused with 400, as with NIXL.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp import web

from lbproxy.sim.engine.sequence import Hold, KvSource, KvState
from lbproxy.sim.mock.apis.call import GenerationCall, PlannedChoice
from lbproxy.sim.mock.apis.fields import EngineError, Json, boolean, invalid, load_json, shown, typed
from lbproxy.sim.mock.connectors.channel import Channel, ChannelPeer, DecodeLeg, ReadTimeouts, RemoteKv
from lbproxy.sim.mock.connectors.legs import Leg, ServerConnector, Unasked
from lbproxy.sim.mock.connectors.nixl import MAX_NAME, NAME
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.serving.driver import Driver

WAIT_S = 480.0
"""VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: how long KV is held, and a prefill is waited for."""
RECEIVE_S = 60.0
"""Longer than that a decode waits."""
QUERY_S = 30.0
"""VLLM_MOONCAKE_CONNECTOR_TIMEOUT."""
DEFAULT_PORT = 8998
MAX_PAGE_BYTES = 2**16
MAX_TRANSFERS = 65_536
QUERY_PATH = "/query"
_REQUIRED = ("transfer_id", "remote_bootstrap_addr", "remote_engine_id")


@dataclass(slots=True, eq=False)
class _PrefillTransfer:
    """What is known of one at the prefill."""

    hold: Hold | None = None
    peer: ChannelPeer | None = None


class Mooncake(ServerConnector):
    """The connector of one server."""

    def __init__(self, options: MockOptions, driver: Driver) -> None:
        self.options = options
        self.wait_s = WAIT_S if options.kv_lease is None else options.kv_lease
        self.engine_id = secrets.token_hex(16)
        """Another at each start."""
        self.channel = Channel()
        self._driver = driver
        self._port = 0
        self._transfers: dict[str, _PrefillTransfer] = {}
        self._bootstrap: web.AppRunner | None = None

    async def start(self, host: str) -> None:
        if self.options.role == "decode":
            return
        await self.channel.listen(host, self.options.side_channel_port, self._heard, self._lost)
        application = web.Application()
        application.router.add_get(QUERY_PATH, self._query, allow_head=False)
        self._bootstrap = web.AppRunner(application, access_log=None, shutdown_timeout=0.001)
        await self._bootstrap.setup()
        port = DEFAULT_PORT if self.options.bootstrap_port is None else self.options.bootstrap_port
        await web.TCPSite(self._bootstrap, host, port).start()
        self._port = self._bootstrap.addresses[0][1]

    async def close(self) -> None:
        bootstrap, self._bootstrap = self._bootstrap, None
        if bootstrap is not None:
            await bootstrap.cleanup()
        await self.channel.close()

    @property
    def address(self) -> tuple[str, int]:
        """Of the bootstrap server."""
        return self.options.host, self._port

    async def _query(self, _request: web.Request) -> web.StreamResponse:
        body = query_body(self.engine_id, (self.options.host, self.channel.port))
        return web.Response(body=body, content_type="application/json")

    def leg(self, fields: Json, call: GenerationCall, request_id: str) -> Leg:
        """A call; those without params are computed here as a whole."""
        params = parse(fields)
        if params is None:
            return Leg(call)
        if params.is_decode:
            return MooncakeDecodeLeg(self, call, params)
        return MooncakePrefillLeg(self, call, params, masks_end=fields.get("min_tokens") == 1 or call.ignore_eos)

    def offer(self, transfer_id: str) -> Hold | None:
        """KV that a decode may ask for; None if another has the id."""
        transfer = self._transfers.setdefault(transfer_id, _PrefillTransfer())
        if transfer.hold is not None:
            return None
        transfer.hold = hold = Hold(self.wait_s)
        hold.changed = partial(self._changed, transfer_id, transfer, hold)
        return hold

    def _changed(self, transfer_id: str, transfer: _PrefillTransfer, hold: Hold) -> None:
        if hold.state is KvState.HELD:
            if transfer.peer is not None:
                transfer.peer.say("held")
        elif hold.state is not KvState.PENDING:
            # A decode that waits is told nothing.
            self._transfers.pop(transfer_id, None)

    def _heard(self, peer: ChannelPeer, words: list[str]) -> None:
        match words:
            case ["claim", engine_id, transfer_id] if not peer.name:
                transfer = self._transfers.setdefault(transfer_id, _PrefillTransfer())
                if engine_id != self.engine_id or transfer.peer is not None or len(self._transfers) > MAX_TRANSFERS:
                    peer.say("lost")
                    return
                peer.name = transfer_id
                transfer.peer = peer
                if transfer.hold is not None and transfer.hold.state is KvState.HELD:
                    peer.say("held")
            case ["done" | "drop"] if peer.name:
                transfer = self._transfers.get(peer.name, _PrefillTransfer())
                if transfer.peer is peer and transfer.hold is not None:
                    self._driver.release(transfer.hold)
            case _:
                peer.close()

    def _lost(self, peer: ChannelPeer) -> None:
        transfer = self._transfers.get(peer.name)
        if transfer is not None and transfer.peer is peer:
            transfer.peer = None
            if transfer.hold is None:
                del self._transfers[peer.name]


class MooncakePrefillLeg(Leg):
    """Its KV is held when it ends, if that is by its length."""

    def __init__(self, mooncake: Mooncake, call: GenerationCall, params: MooncakeParams, *, masks_end: bool) -> None:
        super().__init__(call)
        self.kills = params.kills(mooncake.options.role)
        self._mooncake = mooncake
        self._transfer_id = params.transfer_id
        self._masks_end = masks_end

    def hold(self, index: int, choice: PlannedChoice) -> Hold | None:
        """For the first choice. If that ends by itself, or by a stop string, vLLM frees it at once."""
        is_held = self._masks_end or choice.answer.finish_reason == "length"
        return self._mooncake.offer(self._transfer_id) if index == 0 and self._transfer_id and is_held else None


class _WorkersKv(RemoteKv):
    """KV whose worker has to be asked for first."""

    def __init__(self, mooncake: Mooncake, params: MooncakeParams) -> None:
        patience = ReadTimeouts(mooncake.wait_s + RECEIVE_S, refused_s=0.0)
        super().__init__(mooncake.channel, ("", 0), ("claim", params.engine_id, params.transfer_id), patience)
        self._params = params
        self._is_asked = False

    def call(self) -> None:
        """Ask where the worker is, then that."""
        if not self._is_asked:
            self._is_asked = True
            self._channel.run(self._ask())

    def finish(self, *, now: float, was_read: bool) -> None:
        """Of a request that never had space, too, the prefill learns that it has ended."""
        super().finish(now=now, was_read=was_read)
        self.call()

    async def _ask(self) -> None:
        worker = None
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=QUERY_S)) as session,
                session.get(self._params.bootstrap + QUERY_PATH, allow_redirects=False) as response,
            ):
                worker = worker_of(await response.content.read(MAX_PAGE_BYTES), self._params.engine_id)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError):
            pass
        if worker is None:
            self._become(KvState.LOST)
        else:
            self._connect(worker)


class MooncakeDecodeLeg(DecodeLeg):
    """Its KV comes from elsewhere."""

    def __init__(self, mooncake: Mooncake, call: GenerationCall, params: MooncakeParams) -> None:
        super().__init__(call)
        self.kills = params.kills(mooncake.options.role)
        choices = len(call.prompts) * call.n if params.is_complete and not self.kills else 0
        self._sources = [_WorkersKv(mooncake, params) for _ in range(choices)]

    def source(self, index: int) -> KvSource:
        """What the params name."""
        return self._sources[index] if self._sources else Unasked()


@dataclass(frozen=True, slots=True)
class MooncakeParams:
    """The params of one request, checked. A decode that is not `is_complete` waits for ever."""

    is_prefill: bool
    is_decode: bool
    transfer_id: str
    bootstrap: str = ""
    engine_id: str = ""
    is_complete: bool = False

    def kills(self, role: str) -> bool:
        """Whether this is the wrong half for a server of that role."""
        return (self.is_decode and role == "prefill") or (self.is_prefill and role == "decode")


def parse(fields: Json) -> MooncakeParams | None:
    """What a body says; None = nothing. Raises ApiError."""
    given = typed(fields, NAME, dict, "dict")
    if given is None:
        return None
    prefills, decodes = boolean(given, "do_remote_decode"), boolean(given, "do_remote_prefill")
    for name in _REQUIRED:
        text = typed(given, name, str, "string")
        if text is not None and not (len(text) <= MAX_NAME and text.isprintable() and " " not in text):
            raise invalid("string_type", f"body.{NAME}.{name}", f"one word of {MAX_NAME} characters", shown(text))
    transfer_id, bootstrap, engine_id = (str(given.get(name) or "") for name in _REQUIRED)
    if not prefills and not decodes:
        return None
    complete = bool(transfer_id and bootstrap and engine_id)
    return MooncakeParams(prefills, decodes, transfer_id, bootstrap, engine_id, complete)


def query_body(engine_id: str, address: tuple[str, int]) -> bytes:
    """The page at a prefill's bootstrap port: its one rank, and where the one worker of that is."""
    worker = {"0": {"0": f"tcp://{address[0]}:{address[1]}"}}
    return orjson.dumps({"0": {"engine_id": engine_id, "worker_addr": worker}})


def worker_of(body: bytes, engine_id: str) -> tuple[str, int] | None:
    """Where the worker of an engine is, by such a page; None = it is not there."""
    try:
        for rank in load_json(body).values():
            if isinstance(rank, dict) and rank.get("engine_id") == engine_id:
                where = urlsplit(str(rank["worker_addr"]["0"]["0"]))
                return (where.hostname, where.port) if where.hostname and where.port else None
    except (EngineError, KeyError, TypeError, ValueError):
        return None
    return None
