# SPDX-License-Identifier: Apache-2.0
"""SGLang's disaggregation at the simulated server: the halves of a request meet in a room, in either order.

A prefill server listens at its bootstrap port (`channel.py`). A decode goes to the room as soon as it has space for the
KV; the prefill computes when the decode is there, and responds when that has read. Both refuse a request without a room
(docs/decisions/0041, section 6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lbproxy.sim.engine.sequence import Hold, KvSource, KvState
from lbproxy.sim.mock.apis.call import GenerationCall, PlannedChoice
from lbproxy.sim.mock.apis.fields import EngineError, Json, bad_request, invalid, shown
from lbproxy.sim.mock.connectors.channel import Channel, ChannelPeer, DecodeLeg, ReadTimeouts, RemoteKv
from lbproxy.sim.mock.connectors.legs import Leg, ServerConnector, Unasked
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.serving.driver import Driver

FAKE_HOST = "2.2.2.2"
"""The host of SGLang's own health checks: nothing is transferred, and decode runs on empty KV."""
DEFAULT_PORT = 8998
MAX_ROOM = 2**63 - 1
MAX_HOST = 512
WAIT_S = 300.0
"""SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and _WAITING_TIMEOUT: for the other half."""
MAX_ROOMS = 65_536
"""Rooms that a decode waits in, at one prefill server."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one prompt's prefill and decode meet."""

    host: str
    port: int
    room: int

    @property
    def is_fake(self) -> bool:
        """Nothing is transferred."""
        return self.host == FAKE_HOST


def parse(fields: Json, *, prompts: int, n: int, own_port: int) -> list[Meeting]:
    """One for each choice. A room for several becomes consecutive ones; a list is repeated for `n`. Raises ApiError:
    also for a request without a room.
    """
    rooms = _each(fields, "bootstrap_room", int, prompts)
    if rooms is None or None in rooms:
        text = "Disaggregated request received without bootstrap room id"
        raise bad_request(text, "bootstrap_room")
    hosts = _each(fields, "bootstrap_host", str, prompts) or [None] * prompts
    ports = _each(fields, "bootstrap_port", int, prompts) or [None] * prompts
    meetings: list[Meeting] = []
    is_one = not isinstance(fields["bootstrap_room"], list)
    for index in range(prompts * n):
        prompt = index // n
        room, host, port = rooms[prompt], hosts[prompt], ports[prompt]
        assert isinstance(room, int)
        meeting = Meeting(
            str(host or "127.0.0.1"), port if isinstance(port, int) else own_port, room + (index if is_one else 0)
        )
        if not 0 <= meeting.room <= MAX_ROOM or not 0 < meeting.port <= 65535 or len(meeting.host) > MAX_HOST:
            raise invalid("value_error", "body.bootstrap_room", "Input out of range", shown(fields["bootstrap_room"]))
        meetings.append(meeting)
    return meetings


def _each(fields: Json, name: str, kind: type[int | str], prompts: int) -> Sequence[object] | None:
    """A field's value for each prompt: one for all of them, or a list. None = it is not there."""
    given = fields.get(name)
    if given is None:
        return None
    values = given if isinstance(given, list) else [given] * prompts
    fits = len(values) == prompts and all(value is None or type(value) is kind for value in values)
    if not fits or not all(value is None or not isinstance(value, str) or value.isprintable() for value in values):
        what = "integer" if kind is int else "string"
        raise invalid(f"{what}_type", f"body.{name}", f"Input should be a valid {what}, or one a prompt", shown(given))
    return values


@dataclass(slots=True, eq=False)
class BootstrapRoom:
    """Where one prompt's prefill and decode meet."""

    peer: ChannelPeer | None = None
    """The decode."""
    is_prefilled_here: bool = False
    """The prefill has come."""
    changes: asyncio.Event = field(default_factory=asyncio.Event)
    was_read: bool | None = None
    """None = not yet; False = it never will be."""


class Sglang(ServerConnector):
    """The connector of one server that prefills or decodes."""

    def __init__(self, options: MockOptions, driver: Driver) -> None:
        self.options = options
        self.driver = driver
        self.wait_s = WAIT_S if options.kv_lease is None else options.kv_lease
        self.channel = Channel()
        self.rooms: dict[int, BootstrapRoom] = {}
        self.failed_bootstraps = self.failed_transfers = 0
        self.bootstrapping: set[SglangPrefillLeg] = set()
        """Prefills whose decode has not come."""
        self.inflight: set[SglangPrefillLeg] = set()
        """Prefills that are computed and not read."""

    async def start(self, host: str) -> None:
        """A prefill listens to decodes."""
        if self.options.role == "prefill":
            port = DEFAULT_PORT if self.options.bootstrap_port is None else self.options.bootstrap_port
            await self.channel.listen(host, port, self._heard, self._lost)

    async def close(self) -> None:
        await self.channel.close()

    @property
    def address(self) -> tuple[str, int]:
        """The bootstrap host and port; of a decode, the port that it takes where a request names none."""
        own = self.options.bootstrap_port or DEFAULT_PORT
        return self.options.host, self.channel.port or own

    def queues(self) -> dict[str, int]:
        """SGLang's own for each role."""
        gauges = self.driver.engine.gauges()
        if self.options.role == "prefill":
            own = {
                "num_prefill_bootstrap_queue_reqs": len(self.bootstrapping),
                "num_prefill_inflight_queue_reqs": len(self.inflight),
            }
        else:
            # What waits for space is preallocated as soon as there is some.
            own = {
                "num_queue_reqs": 0,
                "num_decode_prealloc_queue_reqs": gauges.waiting - gauges.deferred,
                "num_decode_transfer_queue_reqs": gauges.deferred,
            }
        failed = self.failed_transfers + gauges.failed_transfers
        return own | {
            "num_bootstrap_failed_reqs_total": self.failed_bootstraps,
            "num_transfer_failed_reqs_total": failed,
        }

    def leg(self, fields: Json, call: GenerationCall, request_id: str) -> Leg:
        """Every call is one half of one. Raises ApiError without a room."""
        meetings = parse(fields, prompts=len(call.prompts), n=call.n, own_port=self.address[1])
        return (SglangPrefillLeg if self.options.role == "prefill" else SglangDecodeLeg)(self, call, meetings)

    def _heard(self, peer: ChannelPeer, words: list[str]) -> None:
        match words:
            case ["room", number] if number.isdecimal() and len(number) < 20 and not peer.name:
                room = self.rooms.setdefault(int(number), BootstrapRoom())
                if room.peer is not None or len(self.rooms) > MAX_ROOMS:
                    peer.say("lost")
                    return
                peer.name = number
                room.peer = peer
                room.changes.set()
            case ["done" | "drop" as word] if peer.name:
                self._end(peer, was_read=word == "done")
            case _:
                peer.close()

    def _lost(self, peer: ChannelPeer) -> None:
        self._end(peer, was_read=False)

    def _end(self, peer: ChannelPeer, *, was_read: bool) -> None:
        room = self.rooms.get(int(peer.name or -1))
        if room is None or room.peer is not peer:
            return
        room.was_read = room.was_read or was_read
        room.changes.set()
        if not room.is_prefilled_here:
            del self.rooms[int(peer.name)]


class SglangPrefillLeg(Leg):
    """The half that computes the prompts."""

    def __init__(self, sglang: Sglang, call: GenerationCall, meetings: list[Meeting]) -> None:
        super().__init__(replace(call, max_tokens=1))
        self._sglang = sglang
        self._meetings = [meeting for meeting in meetings if not meeting.is_fake]
        self._index = {index: place for place, index in enumerate(i for i, m in enumerate(meetings) if not m.is_fake)}
        self._holds: dict[int, Hold] = {}
        self._first_room = meetings[0].room
        self._rooms: list[BootstrapRoom] = []
        for meeting in self._meetings:
            room = sglang.rooms.setdefault(meeting.room, BootstrapRoom())
            if room.is_prefilled_here:
                self.close()
                raise bad_request(f"bootstrap_room {meeting.room} is in use", "bootstrap_room")
            room.is_prefilled_here = True
            self._rooms.append(room)

    def rank(self, named: int | None) -> int | None:
        """`follow_bootstrap_room`, the default of prefill servers."""
        ranks = self._sglang.options.ranks
        return self._first_room % ranks if ranks > 1 and named is None else named

    def hold(self, index: int, choice: PlannedChoice) -> Hold | None:
        """Until the decode has read, however long that takes."""
        if index not in self._index:
            return None
        return self._holds.setdefault(index, Hold(float("inf")))

    def first(self, index: int, choice: PlannedChoice, cached_tokens: int) -> None:
        """The decode may read."""
        self._sglang.inflight.add(self)
        if index in self._index:
            room = self._rooms[self._index[index]]
            if room.peer is not None:
                room.peer.say("held", cached_tokens)

    async def ready(self) -> None:
        """When every decode has come."""
        self._sglang.bootstrapping.add(self)
        if not await self._wait(lambda room: room.peer is not None):
            self._sglang.failed_bootstraps += 1
            raise EngineError(500, f"Prefill bootstrap failed for room {self._first_room}", "InternalServerError")
        self._sglang.bootstrapping.discard(self)

    async def transferred(self) -> None:
        """When every decode has read."""
        if not await self._wait(lambda room: room.was_read is not None) or not all(
            room.was_read for room in self._rooms
        ):
            self._sglang.failed_transfers += 1
            raise EngineError(500, f"Prefill transfer failed for room {self._first_room}", "InternalServerError")

    async def _wait(self, done: Callable[[BootstrapRoom], bool]) -> bool:
        """Until it is so of all rooms; False if that takes too long."""
        try:
            async with asyncio.timeout(self._sglang.wait_s):
                for room in self._rooms:
                    while not done(room):
                        room.changes.clear()
                        await room.changes.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Decodes that have not read learn that they never will."""
        sglang = self._sglang
        sglang.bootstrapping.discard(self)
        sglang.inflight.discard(self)
        for hold in self._holds.values():
            sglang.driver.release(hold)
        for meeting, room in zip(self._meetings, self._rooms, strict=False):
            del sglang.rooms[meeting.room]
            if room.peer is not None and room.was_read is None:
                room.peer.say("lost")


class _Empty(Unasked):
    """What a fake transfer brings."""

    @property
    def state(self) -> KvState:
        return KvState.EXPIRED


class SglangDecodeLeg(DecodeLeg):
    """The half that computes the response."""

    def __init__(self, sglang: Sglang, call: GenerationCall, meetings: list[Meeting]) -> None:
        super().__init__(call)
        self._by_choice = [
            None
            if meeting.is_fake
            else RemoteKv(
                sglang.channel,
                (meeting.host, meeting.port),
                ("room", meeting.room),
                ReadTimeouts(sglang.wait_s, refused_s=0.0),
            )
            for meeting in meetings
        ]
        self._sources = [one for one in self._by_choice if one is not None]

    def source(self, index: int) -> KvSource:
        """What is in the room."""
        return self._by_choice[index] or _Empty()

    def cached_tokens(self, own: int, received: int) -> int:
        """Those of the prefill, one choice for each prompt."""
        told = self._by_choice[:: self.call.n]
        return sum(source.cached_tokens or 0 for source in told if source is not None)
