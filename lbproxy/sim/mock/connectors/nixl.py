# SPDX-License-Identifier: Apache-2.0
"""vLLM's NIXL connector at the simulated server: prefilled KV is held under a lease, and decodes pull it.

Servers reach each other over the side channel (`channel.py`) at the `remote_host` and `remote_port` of the params; a
line is good for one request. vLLM checks nearly nothing of `kv_transfer_params`, and some of what it lets pass kills
the engine or hangs the request (docs/decisions/0041, section 3.5). So does this: `Pull` says what becomes of a request.
What vLLM has no defined behaviour for, such as a port that is a text, is refused with 400.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from lbproxy.sim.engine.sequence import LEASE_S, RENEWAL_SHARE, Hold, KvSource, KvState
from lbproxy.sim.mock.apis.call import GenerationCall, PlannedChoice
from lbproxy.sim.mock.apis.fields import Json, boolean, invalid, shown, typed
from lbproxy.sim.mock.connectors.channel import Channel, ChannelPeer, DecodeLeg, ReadTimeouts, RemoteKv
from lbproxy.sim.mock.connectors.legs import Leg, ServerConnector, Unasked
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.serving.driver import Driver

NAME = "kv_transfer_params"
MAX_NAME = 512
"""Characters of an id or a host."""
MAX_BLOCKS = 2**20
_REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
HANDSHAKE_S = 5.0
"""After which vLLM takes a prefill that does not reply for dead (zmq RCVTIMEO)."""
MAX_ID = 200
"""Characters of a request id of a client's."""


class Pull(Enum):
    """What a request to decode comes to."""

    READS = "reads"
    HANGS = "hangs"
    """It waits for KV that nobody is asked for."""
    KILLS = "kills"
    """An assertion in the engine fails."""


@dataclass(frozen=True, slots=True)
class NixlParams:
    """The params of one request, checked. Neither `is_prefill` nor `pull`: they ask for nothing."""

    is_prefill: bool = False
    pull: Pull | None = None
    engine_id: str = ""
    request_id: str = ""
    host: str = ""
    port: int = 0
    cached_tokens: int | None = None
    """Cached tokens of the prefill, to be reported."""


def parse(fields: Json) -> NixlParams | None:
    """What a body says; None = nothing. Raises ApiError."""
    given = typed(fields, NAME, dict, "dict")
    if given is None:
        return None
    prefills, decodes = boolean(given, "do_remote_decode"), boolean(given, "do_remote_prefill")
    blocks = _blocks(given)
    for name in _REQUIRED[:3]:
        text = typed(given, name, str, "string")
        if text is not None and not (len(text) <= MAX_NAME and text.isprintable()):
            raise invalid("string_too_long", f"body.{NAME}.{name}", f"at most {MAX_NAME} characters", shown(text))
    port = _whole(given, "remote_port", 65535)
    for name in ("tp_size", "dcp_size", "pp_size", "remote_num_tokens", "remote_registration_generation"):
        _whole(given, name, 2**31)
    cached = _whole(given, "remote_prefill_cached_tokens", 2**31)
    if not decodes:
        return NixlParams(is_prefill=prefills)
    if not any(blocks):
        return NixlParams(pull=Pull.KILLS)
    if any(not given.get(name) for name in _REQUIRED):
        return NixlParams(pull=Pull.HANGS)
    engine_id, request_id, host = (str(given[name]) for name in _REQUIRED[:3])
    return NixlParams(False, Pull.READS, engine_id, request_id, host, port or 0, cached)


def _blocks(given: Json) -> list[list[object]]:
    """`remote_block_ids`: a list of lists of ids, one for each group of layers; older vLLM had one list."""
    groups = typed(given, "remote_block_ids", list, "list") or []
    if groups and not isinstance(groups[0], list):
        groups = [groups]
    if not all(isinstance(group, list) for group in groups) or sum(map(len, groups)) > MAX_BLOCKS:
        raise invalid("list_type", f"body.{NAME}.remote_block_ids", "Input should be a valid list", shown(groups))
    if not all(type(block) is int and block >= 0 for group in groups for block in group):
        raise invalid("int_type", f"body.{NAME}.remote_block_ids", "Input should be block ids", shown(groups))
    return groups


def _whole(given: Json, name: str, at_most: int) -> int | None:
    value = given.get(name)
    if value is None or (type(value) is int and 0 <= value <= at_most):
        return value if isinstance(value, int) else None
    raise invalid("int_type", f"body.{NAME}.{name}", "Input should be a valid integer", shown(value))


def response_params(
    *, blocks: Sequence[int], engine_id: str, request_id: str, address: tuple[str, int], tokens: int, cached: int
) -> Json:
    """What the response of a prefill says of its KV, which is held."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(blocks)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": address[0],
        "remote_port": address[1],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached,
    }


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


class NixlDecodeLeg(DecodeLeg):
    """Its KV comes from elsewhere."""

    def __init__(self, nixl: Nixl, call: GenerationCall, params: NixlParams, choices: int) -> None:
        super().__init__(call)
        self.kills = params.pull is Pull.KILLS
        self._params = params
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

    def cached_tokens(self, own: int, received: int) -> int:
        """The prefill's, if the params tell; else all that was not computed here, as of vLLM 0.27 and before."""
        told = self._params.cached_tokens
        return own + received if told is None else told
