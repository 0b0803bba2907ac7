# SPDX-License-Identifier: Apache-2.0
"""Saved data is not trusted: what is not as lbproxy writes it is refused, and nothing of it reaches the balancer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from lbproxy.config.sections.flows import FlowSettings, FlowsSettings
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.saved import reading
from lbproxy.core.saved import reading as lines
from lbproxy.core.saved.pieces import VERSION, Durations
from lbproxy.core.saved.reading import MAX_AGE_S, SavedError, encode, read_lines
from tests.core.saved.test_saved import ask, experienced, load_of, prompt, restored
from tests.support.pool import pool_of, spec

Pieces = list[dict[str, Any]]


def written() -> list[bytes]:
    limited = FlowsSettings(default=FlowSettings(requests_per_minute=100))
    balancer = experienced(endpoints=2, flows=limited)
    load_of(balancer).adapters.placed("sql", 1.0)
    balancer.set_endpoints([replace(spec(1), bounds=Bounds(60, 60, 1000, 10**6)), spec(2)], now=210.0)
    balancer.sleepers.remember({spec(3).base_url: Durations((3.0, 4.0), (1.0,), ())})
    ask(balancer, prompt(0), now=499.9)
    pieces = balancer.restarts.save(saved_at=1e9, prefixes=True, now=500.0)
    return [encode(piece) for piece in pieces if piece is not None]


WRITTEN = written()


def changed(change: Callable[[Pieces], object]) -> list[bytes]:
    pieces: Pieces = [orjson.loads(line) for line in WRITTEN]
    change(pieces)
    return [encode(piece) for piece in pieces]


def kind(pieces: Pieces, wanted: str) -> dict[str, Any]:
    return next(one for one in pieces if one["kind"] == wanted)


def put(wanted: str, value: object, *path: str) -> Callable[[Pieces], object]:
    """Replace one value in the first piece of a kind."""

    def change(pieces: Pieces) -> None:
        found = kind(pieces, wanted)
        for name in path[:-1]:
            found = found[name]
        found[path[-1]] = value

    return change


BAD: dict[str, tuple[Callable[[Pieces], object], str]] = {
    "another program's": (put("head", "x", "format"), "not a state file"),
    "newer": (put("head", VERSION + 1, "version"), f"version {VERSION + 1}"),
    "no version": (put("head", "1", "version"), "no version"),
    "no time": (put("head", None, "saved_at"), "saved_at"),
    "no head": (lambda pieces: pieces.pop(0), "not a state file"),
    "no end": (lambda pieces: pieces.pop(), "its end is missing"),
    "something after the end": (lambda pieces: pieces.append({"kind": "pool"}), "not a state file"),
    "no pool": (lambda pieces: pieces.pop(1), "no pool"),
    "two pools": (lambda pieces: pieces.insert(1, pieces[1]), "two pools"),
    "unknown piece": (lambda pieces: pieces.insert(1, {"kind": "x"}), "unknown kind"),
    "a rate that is text": (put("pool", "1", "learned", "pool", "token_ms"), "pool.token_ms"),
    "a rate that is true": (put("pool", True, "learned", "pool", "token_ms"), "pool.token_ms"),
    "a rate of 0": (put("pool", 0, "learned", "pool", "token_ms"), "pool.token_ms"),
    "a rate that is huge": (put("pool", 1e300, "learned", "pool", "token_ms"), "pool.token_ms"),
    "no number": (put("pool", None, "learned", "pool", "token_ms"), "pool.token_ms"),
    "a group that lacks": (lambda pieces: kind(pieces, "pool")["learned"].pop("size"), "missing"),
    "a value that lacks": (lambda pieces: kind(pieces, "pool")["learned"]["size"].pop("least"), "missing"),
    "a value too many": (put("pool", 1.0, "learned", "size", "x"), "unknown"),
    "an empty pool group": (put("pool", {}, "learned", "gaps"), "missing"),
    "a factor out of range": (put("endpoint", 21.0, "learned", "speed", "ln_factor"), "speed.ln_factor"),
    "a URL that is a number": (put("endpoint", 1, "url"), "no URL"),
    "a long URL": (put("endpoint", "x" * 3000, "url"), "no URL"),
    "a URL twice": (put("endpoint", "http://10.0.0.2:8000", "url"), "too many endpoints"),
    "a start that is text": (put("endpoint", "yesterday", "started_at"), "started_at"),
    "an adapter that is a number": (put("endpoint", [1], "loaded"), "adapters"),
    "an adapter with a line break": (put("endpoint", ["a\nb"], "known"), "adapters"),
    "many adapters": (put("endpoint", ["a"] * 1025, "known"), "adapters"),
    "adapters that are none": (put("endpoint", "a", "known"), "expected a list"),
    "a node that is text": (put("nodes", ["x"], "nodes"), "malformed"),
    "a node before itself": (put("nodes", [[0, "AAAAAAAAAAA="]], "nodes"), "malformed"),
    "a node without keys": (put("nodes", [[-1, ""]], "nodes"), "malformed"),
    "half a key": (put("nodes", [[-1, "AAAA"]], "nodes"), "malformed"),
    "no base64": (put("nodes", [[-1, "!!!!!!!!!!!="]], "nodes"), "malformed"),
    "not ASCII": (put("nodes", [[-1, "é" * 12]], "nodes"), "malformed"),
    "an end that is nowhere": (put("ends", [10**6], "nodes"), "no end"),
    "an end below 0": (put("ends", [-1], "nodes"), "no end"),
    "an end at no endpoint": (put("ends", 2, "endpoint"), "at no endpoint"),
    "ends of an endpoint below 0": (put("ends", -1, "endpoint"), "at no endpoint"),
    "an old one without a pool": (lambda pieces: (put("head", 1, "version")(pieces), pieces.pop(1)), "no pool"),
    "endpoints without a pool": (lambda pieces: pieces.pop(1), "no pool"),
    "a pool without blocks": (put("head", None, "block_bytes"), "no pool"),
    "use that is text": (put("used", "1", "tokens"), "used.tokens"),
    "use that is true": (put("used", True, "requests"), "used.requests"),
    "use below 0": (put("used", -1.0, "tokens"), "used.tokens"),
    "use that is huge": (put("used", 1e300, "tokens"), "used.tokens"),
    "no use": (put("used", None, "requests"), "used.requests"),
    "a day that is text": (put("used", "1", "day"), "expected a list"),
    "a day with text": (put("used", ["1"], "day"), "used.day"),
    "a day with a negative amount": (put("used", [1.0, -1e9], "day"), "used.day"),
    "a day with a list": (put("used", [[1.0]], "day"), "used.day"),
    "a day with a huge amount": (put("used", [1e16], "day"), "used.day"),
    "a day of many steps": (put("used", [0.0] * 146, "day"), "at most 145"),
    "a time of use that is text": (put("used", "now", "at"), "used.at"),
    "a time of use that is negative": (put("used", -1.0, "at"), "used.at"),
    "a time of use that is nothing": (put("used", None, "at"), "used.at"),
    "a day that begins nowhere": (put("used", "now", "day_at"), "used.day_at"),
    "use of nothing": (put("used", "", "key"), "no URL"),
    "use of a number": (put("used", 7, "key"), "no URL"),
    "use twice": (lambda pieces: pieces.insert(-1, kind(pieces, "used")), "too many endpoints"),
    "flow use that is text": (put("flow", "1", "requests"), "flow.requests"),
    "flow use below 0": (put("flow", -1.0, "tokens"), "flow.tokens"),
    "a time of flow use that is nothing": (put("flow", None, "at"), "flow.at"),
    "a flow without a name": (put("flow", "", "name"), "no name"),
    "a flow that is a number": (put("flow", 7, "name"), "no name"),
    "a flow with a line break": (put("flow", "a\nb", "name"), "no name"),
    "a flow twice": (lambda pieces: pieces.insert(-1, kind(pieces, "flow")), "too many endpoints or flows"),
    "a wake that is text": (put("sleep", ["1"], "wakes"), "sleep.wakes"),
    "a wake below 0": (put("sleep", [-1.0], "wakes"), "sleep.wakes"),
    "a wake of days": (put("sleep", [1e6], "wakes"), "sleep.wakes"),
    "a start of years": (put("sleep", [1e9], "starts"), "sleep.starts"),
    "wakes that are none": (put("sleep", None, "wakes"), "expected a list"),
    "many sleeps": (put("sleep", [1.0] * 17, "sleeps"), "at most 16"),
    "a server without a URL": (put("sleep", None, "url"), "no URL"),
    "a server twice": (lambda pieces: pieces.insert(-1, kind(pieces, "sleep")), "too many endpoints"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_refused(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(SavedError, match=message):
        read_lines(changed(change))


def test_what_was_written_is_accepted() -> None:
    saved = read_lines(WRITTEN)
    assert (saved.saved_at, len(saved.endpoints), len(saved.keys)) == (1e9, 2, 40)


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"null\n", b"[]\n", b"\xff\xfe\n", b"x" * (1 << 21), b"[" * 100_000, b'{"kind":"head"}\n']
)
def test_what_is_no_such_data_is_refused(data: bytes) -> None:
    with pytest.raises(SavedError):
        read_lines(data.splitlines(keepends=True))


def test_a_file_that_was_cut_anywhere_is_refused() -> None:
    data = b"".join(WRITTEN)
    for length in range(0, len(data) - 1, 97):
        with pytest.raises(SavedError):
            read_lines(data[:length].splitlines(keepends=True))


@pytest.mark.parametrize(("name", "bound"), [("MAX_NODES", 3), ("MAX_KEYS", 20), ("MAX_ENDS", 5), ("MAX_DEPTH", 4)])
def test_what_is_too_large_is_refused(name: str, bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, name, bound)
    with pytest.raises(SavedError, match="too many"):
        read_lines(WRITTEN)


def test_prompts_that_would_take_too_long_to_restore_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used ones."""
    monkeypatch.setattr(reading, "MAX_RESTORED_KEYS", 25)
    saved = read_lines(WRITTEN)
    everything = read_lines_without_limit(monkeypatch)
    for url, endpoint in saved.endpoints.items():
        assert endpoint.ends == everything.endpoints[url].ends[-3:]


def read_lines_without_limit(monkeypatch: pytest.MonkeyPatch) -> reading.Saved:
    monkeypatch.undo()
    return lines.read_lines(WRITTEN)


def test_age() -> None:
    saved = read_lines(WRITTEN)
    assert saved.age_s(1e9 + 10.0) == 10.0
    assert saved.age_s(1e9 - 1.0) == 0.0, "a clock that was set back a little"
    with pytest.raises(SavedError, match="future"):
        saved.age_s(1e9 - 60.0)
    with pytest.raises(SavedError, match="hours old"):
        saved.age_s(1e9 + MAX_AGE_S + 1.0)


def test_random_damage_is_refused_or_harmless() -> None:
    """A balancer with what was accepted works."""
    rng = random.Random(11)
    accepted = 0
    for _ in range(400):
        data = bytearray(b"".join(WRITTEN))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice([b"", b"0", b"9", b"-", b"e9", b'"', b"null", b"\xff", b"]"])
        try:
            saved = read_lines(bytes(data).splitlines(keepends=True))
        except SavedError:
            continue
        accepted += 1
        balancer, _ = restored(saved, endpoints=2)
        for number in range(3):
            ask(balancer, prompt(1000 * number), now=1.0 + number, cached=5)
        fresh, _ = pool_of(2, policy="adaptive")
        assert balancer.learned(now=9.0) is not None
        assert len(load_of(balancer).pool.index._caches) == len(load_of(fresh).pool.index._caches)
    assert accepted > 10
