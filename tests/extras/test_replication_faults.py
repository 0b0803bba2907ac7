# SPDX-License-Identifier: Apache-2.0
"""The exchange of replicas over a store in memory: values that nobody can write down, and defects of our own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from lbproxy.config.balancing import BalancingSettings
from lbproxy.config.sections.replicas import ReplicasSettings
from lbproxy.config.sections.routing import RoutingSettings
from lbproxy.core.balancer import Balancer
from lbproxy.core.policies.registry import make_policy
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.driver.runtime import Runtime
from lbproxy.extras import replication
from lbproxy.extras.replication import Replication
from tests.support.aio import run, until
from tests.support.pool import MODEL, card, spec, submit


@dataclass
class Shelf:
    """What a store keeps."""

    streams: dict[str, list[bytes]] = field(default_factory=dict)
    infos: dict[str, bytes] = field(default_factory=dict)
    days: dict[str, bytes] = field(default_factory=dict)


class MemoryStore:
    """See Store."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    async def append(self, replica: str, batch: bytes) -> None:
        self._shelf.streams.setdefault(replica, []).append(batch)

    async def last(self, replica: str) -> bytes:
        return b"%d" % len(self._shelf.streams.get(replica, ()))

    async def read(self, positions: Mapping[str, bytes]) -> list[tuple[str, bytes, bytes]]:
        await asyncio.sleep(0.01)
        found = []
        for replica, position in positions.items():
            for at, batch in enumerate(self._shelf.streams.get(replica, ())):
                if at >= int(position):
                    found.append((replica, b"%d" % (at + 1), batch))
        return found

    async def beat(self, replica: str, info: bytes) -> tuple[dict[str, bytes], list[str]]:
        self._shelf.infos[replica] = info
        return dict(self._shelf.infos), []

    async def leave(self, replica: str) -> None:
        self._shelf.infos.pop(replica, None)

    async def want(self, of: str, replica: str) -> None:
        """Nobody answers."""

    async def give(self, to: str, data: bytes) -> None:
        """Nobody asked."""

    async def receive(self, replica: str) -> bytes | None:
        return b""

    async def keep_day(self, name: str, use: bytes) -> None:
        self._shelf.days[name] = use

    async def days(self, first: str) -> list[bytes]:
        return [use for name, use in self._shelf.days.items() if name >= first]

    async def ping(self) -> dict[str, bytes]:
        return {}

    async def close(self) -> None:
        """Nothing to let go of."""


class Member:
    """One replica, whose requests the test places."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        rng = random.Random(1)
        balancer = Balancer(make_policy(RoutingSettings(), rng), BalancingSettings(), rng=rng)
        self.runtime = Runtime(balancer)
        for endpoint in self.runtime.set_endpoints([spec(1)]).added:
            self.runtime.report_health(endpoint.uid, True, "test")
            self.runtime.report_models(endpoint.uid, [card(MODEL)])
        settings = ReplicasSettings.model_validate({"name": name, "url": "redis://nowhere"})
        self.replication = Replication(settings, balancer, self.runtime, lambda: MemoryStore(shelf))
        self.balancer = balancer

    @property
    def elsewhere(self) -> int:
        """Requests of others, as this one knows."""
        return sum(state.elsewhere for state in self.balancer.endpoints.members())


def together(body: Callable[[Member, Member], object]) -> None:
    """Run `body` with two replicas that know each other."""

    async def both() -> None:
        shelf = Shelf()
        members = [Member(shelf, name) for name in ("a", "b")]
        runs = [asyncio.create_task(one.replication.run()) for one in members]
        await until(lambda: all(len(one.replication.facts().others) == 1 for one in members), "they know each other")
        await body(*members)  # type: ignore[misc]
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    run(both())


@pytest.mark.parametrize("session", ["\ud800", "x\udfff" * 60, "\0", "\U0010ffff" * 128, "s" * 128])
def test_no_session_of_a_client_ends_the_exchange(session: str) -> None:
    """A lone surrogate in `prompt_cache_key` did, each time that the request was told again."""

    async def body(a: Member, b: Member) -> None:
        submit(a.runtime, InferenceRequest("r1", MODEL, True, 200, 100, session=session))
        submit(a.runtime, InferenceRequest("r2", MODEL, True, 200, 100))
        await until(lambda: b.elsewhere == 2, "the other one is told of both")
        assert a.replication.stats.failures == b.replication.stats.malformed == 0

    together(body)


def test_while_the_exchange_fails_by_a_defect_it_is_not_shown_as_connected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else no alert says that each replica balances alone; and what others had in flight would count for ever."""

    async def body(a: Member, b: Member) -> None:
        submit(b.runtime, InferenceRequest("r1", MODEL, True, 200, 100))
        await until(lambda: a.elsewhere == 1, "the first one is told")
        with monkeypatch.context() as patch:
            patch.setattr(replication, "decode", broken)
            patch.setattr(replication, "RETRY_FIRST_S", 60.0)
            patch.setattr(replication, "RETRY_MAX_S", 60.0)
            submit(b.runtime, InferenceRequest("r2", MODEL, True, 200, 100))
            await until(lambda: a.replication.problem is not None, "it is not connected")
            assert "ZeroDivisionError" in str(a.replication.problem)
            await until(lambda: a.elsewhere == 0, "what others had in flight is taken out", within_s=60.0)
        assert a.replication.stats.failures
        assert "the exchange failed" in caplog.text

    together(body)


def broken(data: bytes) -> None:
    """A defect."""
    raise ZeroDivisionError(len(data))


def test_the_exchange_goes_on_after_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins again by itself, and everything is told again."""

    async def body(a: Member, b: Member) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(replication, "decode", broken)
            submit(b.runtime, InferenceRequest("r1", MODEL, True, 200, 100))
            await until(lambda: a.replication.problem is not None, "it is not connected")
        await until(lambda: a.replication.problem is None, "it is connected")
        await until(lambda: a.elsewhere == 1, "the first one is told")

    together(body)
