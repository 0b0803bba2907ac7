# SPDX-License-Identifier: Apache-2.0
"""Prefill at one engine and decode at another, by hand-computed cases and under random schedules."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.sim.engine.engine import Engine, RequestTooLong, SimRequest, StepDone
from lbproxy.sim.engine.link import KvLink
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.engine.ranks import RankedEngine
from lbproxy.sim.engine.sequence import Hold, KvState
from tests.sim.engine.test_engine import STEADY, hashes

APART = dataclasses.replace(STEADY, transfer_ms=2.0, transfer_token_ms=0.1)
"""Steps of 10 ms; a transfer of 48 tokens takes 6.8."""
PROMPT = 3 * BLOCK_TOKENS


class Pair:
    """Two engines, a link and a clock; everything happens when it is due."""

    def __init__(self, **decode: object) -> None:
        self.p, self.d = Engine(APART), Engine(dataclasses.replace(APART, **decode))  # type: ignore[arg-type]
        self.link = KvLink()
        self.now = 0.0
        self.steps: list[tuple[str, StepDone]] = []

    def run(self, until: float = float("inf")) -> None:
        """Up to a time, or until nothing happens any more."""
        while (due := self._due()) <= until and due < float("inf"):
            self.now = max(self.now, due)
            for name, engine in (("p", self.p), ("d", self.d)):
                self.steps += [(name, step) for step in engine.advance(now=self.now)]
                self.link.settle(now=self.now)
        if until < float("inf"):
            self.now = until
            for engine in (self.p, self.d):
                engine.requests(now=until)

    def _due(self) -> float:
        return min((due for one in (self.p, self.d) if (due := one.next_event()) is not None), default=float("inf"))

    def prefill(self, name: str = "a", tokens: int = PROMPT, lease_s: float = 30.0) -> Hold:
        """Begin one."""
        return self.link.prefill(self.p, request(name, tokens, 9), now=self.now, lease_s=lease_s)

    def decode(self, hold: Hold, name: str = "a", tokens: int = PROMPT, output: int = 3, **more: bool) -> None:
        """Begin the other."""
        self.link.decode(self.d, request(name, tokens, output), hold, now=self.now, **more)

    def abort(self, engine: Engine, name: str = "a") -> None:
        """With what follows from it."""
        engine.abort(name, now=self.now)
        self.link.settle(now=self.now)

    def first(self, where: str = "d") -> list[tuple[float, int, int, bool]]:
        """First tokens: milliseconds, cached and received tokens, garbage."""
        return [
            (round(step.at * 1000, 6), first.cached_tokens, first.received_tokens, first.garbage)
            for name, step in self.steps
            for first in step.first
            if name == where
        ]

    def finished(self, where: str = "d") -> list[str]:
        """Ids."""
        return [one for name, step in self.steps if name == where for one in step.finished]

    def failed(self) -> list[str]:
        """Ids."""
        return [one for _, step in self.steps for one in step.failed]


def state(hold: Hold) -> KvState:
    """As it is now: mypy takes an attribute that was compared for one that does not change."""
    return hold.state


def request(name: str, tokens: int = PROMPT, output: int = 3) -> SimRequest:
    """One whose prompt depends on its name's first letter only."""
    return SimRequest(name, tokens, output, hashes(prefix=name[0], blocks=(tokens + output) // BLOCK_TOKENS))


def test_a_prefilled_prompt_is_held_and_then_decoded_elsewhere() -> None:
    pair = Pair()
    hold = pair.prefill()
    pair.run(until=0.015)
    assert pair.first("p") == [(10.0, 0, 0, False)]
    assert state(hold) is KvState.HELD
    assert pair.p.gauges().held_blocks == 3
    assert pair.p.gauges().kv_usage == 3 / 64
    pair.decode(hold)
    pair.run(until=0.020)
    assert (pair.d.gauges().waiting, pair.d.gauges().deferred, pair.d.gauges().running) == (1, 1, 0)
    pair.run(until=0.022)
    assert pair.p.gauges().held_blocks == pair.p.gauges().kv_usage == 0
    pair.run()
    # 15 ms + 2 ms + 48 * 0.1 ms, then a step.
    assert pair.first() == [(31.8, 0, 48, False)]
    assert pair.finished() == ["a"]
    assert state(hold) is KvState.FREED
    assert pair.d.gauges().kv_usage == 0
    assert (pair.d.gauges().transfers, pair.d.gauges().received_tokens) == (1, 48)


def test_decode_has_no_prefill_work() -> None:
    """A prompt of several budgets is one step there, where it takes the other engine several."""
    pair = Pair()
    hold = pair.prefill(tokens=320)
    pair.run(until=1.0)
    assert pair.first("p") == [(40.0, 0, 0, False)]
    pair.decode(hold, tokens=320)
    pair.run()
    assert pair.first() == [(1044.0, 0, 320, False)]


def test_what_decode_has_cached_is_not_transferred_and_both_keep_the_prefix() -> None:
    pair = Pair()
    for name in ("a1", "a2"):
        hold = pair.prefill(name)
        pair.run(until=pair.now + 1.0)
        pair.decode(hold, name)
        pair.run(until=pair.now + 1.0)
    # The last block has the last token, which is always computed, and so is never found.
    assert pair.first() == [(1016.8, 0, 48, False), (3013.6, 32, 16, False)]
    assert [cached for _, cached, _, _ in pair.first("p")] == [0, 32]


def test_decode_may_be_there_before_the_prefill() -> None:
    """The rendezvous of SGLang and Mooncake: blocks are taken at once, and filled when there is something."""
    pair = Pair()
    hold = pair.prefill(tokens=320)
    pair.decode(hold, tokens=320)
    pair.run(until=0.030)
    assert pair.d.gauges().deferred == 1
    assert pair.d.gauges().kv_usage == 20 / 64
    pair.run()
    assert pair.first() == [(84.0, 0, 320, False)]
    assert pair.p.gauges().held_blocks == 0


def test_the_lease_ends_and_who_reads_later_gets_garbage() -> None:
    pair = Pair()
    hold = pair.prefill(lease_s=1.0)
    pair.run()
    assert pair.now == pytest.approx(1.010)
    assert state(hold) is KvState.EXPIRED
    assert (pair.p.gauges().held_blocks, pair.p.gauges().expired_holds) == (0, 1)
    pair.decode(hold)
    pair.run()
    assert [garbage for _, _, _, garbage in pair.first()] == [True]
    assert pair.finished() == ["a"]
    assert pair.d.gauges().garbage == 1


def test_a_decode_that_waits_renews_the_lease() -> None:
    """Its slot is taken for longer than the lease."""
    pair = Pair(max_sequences=1)
    pair.d.add(request("busy", 16, 500), now=0.0)
    hold = pair.prefill(lease_s=1.0)
    pair.run(until=0.5)
    pair.decode(hold)
    pair.run(until=4.0)
    assert (pair.d.gauges().waiting, pair.d.gauges().deferred) == (1, 0)
    assert pair.p.gauges().held_blocks == 3
    pair.run()
    assert pair.first()[1][1:] == (0, 48, False)
    assert pair.p.gauges().expired_holds == 0


def test_decode_waits_for_space_for_all_of_its_prompt() -> None:
    pair = Pair(kv_tokens=6 * BLOCK_TOKENS)
    pair.d.add(request("busy", 4 * BLOCK_TOKENS, 20), now=0.0)
    hold = pair.prefill()
    pair.run(until=0.1)
    pair.decode(hold)
    pair.run(until=0.15)
    assert (pair.d.gauges().waiting, pair.d.gauges().deferred) == (1, 0)
    pair.run()
    assert pair.finished() == ["busy", "a"]
    assert pair.first()[1][0] == 216.8, "the other ended at 200 ms"


def test_held_blocks_keep_others_waiting_until_the_lease_ends() -> None:
    """Then there are requests, and no step."""
    pair = Pair()
    hold = pair.prefill(tokens=60 * BLOCK_TOKENS, lease_s=1.0)
    pair.run(until=0.5)
    pair.p.add(request("b", 10 * BLOCK_TOKENS, 2), now=0.5)
    pair.run(until=0.9)
    assert (pair.p.gauges().running, pair.p.gauges().waiting) == (0, 1)
    assert pair.finished("p") == ["a"]
    pair.run()
    assert state(hold) is KvState.EXPIRED
    assert pair.finished("p") == ["a", "b"]


def test_a_prefill_that_is_aborted_is_never_held() -> None:
    pair = Pair()
    hold = pair.prefill(tokens=320)
    pair.run(until=0.015)
    pair.abort(pair.p)
    assert state(hold) is KvState.LOST
    pair.run(until=1.0)
    assert pair.p.gauges().kv_usage == pair.p.gauges().held_blocks == 0


def test_an_abort_after_the_prefill_does_nothing() -> None:
    pair = Pair()
    pair.prefill()
    pair.run(until=0.5)
    assert not pair.p.abort("a", now=pair.now)
    assert pair.p.gauges().held_blocks == 3


@pytest.mark.parametrize("busy", [True, False], ids=["queued", "transferred"])
def test_a_decode_that_is_aborted_frees_what_is_held(busy: bool) -> None:
    pair = Pair(max_sequences=1, transfer_ms=500.0)
    if busy:
        pair.d.add(request("busy", 16, 100), now=0.0)
    hold = pair.prefill()
    pair.run(until=0.1)
    pair.decode(hold)
    pair.run(until=0.2)
    assert pair.d.gauges().deferred == (0 if busy else 1)
    pair.abort(pair.d)
    assert state(hold) is KvState.FREED
    assert pair.p.gauges().held_blocks == 0
    pair.run()
    assert pair.finished() == (["busy"] if busy else [])
    assert pair.d.gauges().kv_usage == 0


def test_a_decode_that_is_aborted_before_the_prefill_ended_leaves_nothing_held() -> None:
    pair = Pair()
    hold = pair.prefill(tokens=320)
    pair.decode(hold, tokens=320)
    pair.run(until=0.015)
    pair.abort(pair.d)
    pair.run(until=1.0)
    assert pair.finished("p") == ["a"]
    assert state(hold) is KvState.FREED
    assert pair.p.gauges().held_blocks == pair.d.gauges().kv_usage == 0


def test_a_decode_that_cannot_run_frees_what_is_held() -> None:
    pair = Pair(max_model_len=50)
    hold = pair.prefill()
    pair.run(until=0.1)
    with pytest.raises(RequestTooLong):
        pair.decode(hold)
    pair.link.settle(now=pair.now)
    assert state(hold) is KvState.FREED


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("when", ["queued", "transferred", "before"])
def test_lost_kv_fails_the_decode_or_has_it_computed(when: str, recompute: bool) -> None:
    pair = Pair(transfer_ms=500.0)
    hold = pair.prefill(tokens=96)
    pair.run(until=0.005 if when == "before" else 0.1)
    if when != "queued":
        pair.decode(hold, tokens=96, recompute=recompute)
        pair.run(until=pair.now)
    pair.p.restart(now=pair.now)
    pair.link.settle(now=pair.now)
    if when == "queued":
        pair.decode(hold, tokens=96, recompute=recompute)
    pair.run()
    assert (pair.failed(), pair.finished()) == (([], ["a"]) if recompute else (["a"], []))
    assert [how for _, *how in pair.first()] == ([[0, 0, False]] if recompute else [])
    assert pair.d.gauges().failed_transfers == 1
    assert pair.d.gauges().kv_usage == 0
    assert pair.d.requests(now=pair.now) == 0


def test_when_the_decoding_engine_fails_the_lease_ends_soon() -> None:
    """Two thirds of it after the last heartbeat."""
    pair = Pair(transfer_ms=5000.0)
    hold = pair.prefill(lease_s=3.0)
    pair.run(until=0.5)
    pair.decode(hold)
    pair.run(until=4.0)
    assert state(hold) is KvState.HELD
    assert pair.d.restart(now=4.0) == ["a"]
    pair.link.settle(now=4.0)
    pair.run()
    assert pair.now == 6.0
    assert state(hold) is KvState.EXPIRED


def test_a_second_decode_reads_garbage() -> None:
    """As with NIXL: the first one that has read frees."""
    pair = Pair()
    hold = pair.prefill()
    pair.run(until=0.1)
    pair.decode(hold, "a1")
    pair.run(until=0.5)
    pair.decode(hold, "a2")
    pair.run()
    assert [garbage for _, _, _, garbage in pair.first()] == [False, True]


def test_ranks_hold_and_release() -> None:
    """Whichever of them it was."""
    server = RankedEngine([Engine(APART), Engine(APART)])
    holds = [Hold(), Hold()]
    for name, hold in zip("ab", holds, strict=True):
        server.add(dataclasses.replace(request(name, output=1), hold=hold), now=0.0)
    server.advance(now=1.0)
    assert [rank.gauges().held_blocks for rank in server.ranks] == [3, 3]
    assert all(server.release(hold, now=1.0) for hold in holds)
    assert server.gauges().held_blocks == 0
    assert not server.release(holds[0], now=1.0)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_nothing_is_left_whatever_happens(seed: int) -> None:
    """Random requests and legs, aborts, restarts, small caches: each request ends, and no block stays in use."""
    rng = random.Random(seed)
    pair = Pair(kv_tokens=24 * BLOCK_TOKENS, max_sequences=3)
    holds: list[tuple[str, Hold]] = []
    begun, ended = set[str](), set[str]()
    for number in range(25):
        pair.run(until=pair.now + rng.choice([0.0, 0.003, 0.05]))
        name = f"{rng.choice('abc')}{number}"
        match rng.randrange(6):
            case 0 | 1:
                holds.append((name, pair.prefill(name, rng.randrange(1, 200), lease_s=rng.choice([0.02, 1.0]))))
            case 2 | 3 if holds:
                name, hold = holds.pop(rng.randrange(len(holds)))
                tokens = len(hold.blocks) * BLOCK_TOKENS or 7
                pair.decode(hold, name, tokens, rng.randrange(1, 100), recompute=rng.random() < 0.5)
                begun.add(name)
            case 4:
                where = rng.choice([pair.p, pair.d])
                name = rng.choice([*begun, *(one for one, _ in holds), ""])
                if where.abort(name, now=pair.now) and where is pair.d:
                    ended.add(name)
            case 5 if rng.random() < 0.3:
                where = rng.choice([pair.p, pair.d])
                lost = where.restart(now=pair.now)
                if where is pair.d:
                    ended |= {one for one in lost if one in begun}
            case _:
                pair.d.add(request(name, rng.randrange(1, 200), rng.randrange(1, 60)), now=pair.now)
                begun.add(name)
        pair.link.settle(now=pair.now)
    pair.run()
    for engine in (pair.p, pair.d):
        assert engine.requests(now=pair.now) == 0
        assert engine.gauges().kv_usage == engine.gauges().held_blocks == engine.gauges().waiting == 0
    assert set(pair.finished()) | set(pair.failed()) | ended == begun
    assert not pair.link._readers
    assert not pair.link._holders


def test_a_prefill_of_several_tokens_is_held_with_all_of_them() -> None:
    """A router that forgets max_tokens pays for it twice."""
    pair = Pair()
    pair.p.add(dataclasses.replace(request("a", output=20), hold=Hold()), now=0.0)
    pair.run(until=1.0)
    assert pair.p.gauges().held_blocks == 5, "48 tokens and 19"
