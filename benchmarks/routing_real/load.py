# SPDX-License-Identifier: Apache-2.0
"""How much to ask of servers that nobody has described: measured at the servers themselves, without a router.

Texts: so long that a prompt is computed in the share of a run that it has on one core, for which cells are told, as far
as the model's context allows. Users: a cell is sent, each user to one server, by more and more of them until the
servers answer no more of them than before. That rate, over what one set of users asks for at leisure, is how many sets
the servers can serve; of these a cell has its share (`Cell.load`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import httpx
import orjson

from benchmarks.http_routing.client import Answer, Call
from benchmarks.http_routing.trial import ask_client
from benchmarks.routing_real.cells import CELLS, Cell, kind_of, sized
from benchmarks.routing_real.client import RecordedRequest
from benchmarks.routing_real.fleet import ServerSet, UnfitError
from lbproxy.sim.workloads.prompts import Piece, piece_text

CLIENT = "benchmarks.routing_real.client"
ONE_CORE_TOKENS_S = 2000.0
"""Tokens of prompts a second of the servers for which cells are told."""
MOST_WORDS = 5.0
LEAST_WORDS = 0.1
"""Of the lengths told: below, there is nothing to cache."""
CONTEXT_SHARE = 0.9
"""Of a model's context is used: how many tokens a text has is an estimate."""
TEMPLATE_TOKENS = 100
"""Of a chat template, at most."""
LONGEST = max(who.max_context for cell in CELLS.values() for who in cell.kinds.values())
ENOUGH_S = 0.2
"""A prompt that takes so long tells the speed: what is constant is a few milliseconds."""
STEP_S = 3.0
"""How long users begin requests."""
GROWTH = 3.0
FULL = 0.7
"""Servers that do less than this share of what is offered are full."""
MOST_USERS = 3000
"""For one process of a client; one core."""


class Speed(NamedTuple):
    """Of one server with its model."""

    tokens_s: float
    """Of a prompt, computed alone."""
    tokens_per_word: float


def speed_of(servers: ServerSet) -> Speed:
    """Of the slowest. Raises UnfitError."""
    found = [_speed(url, servers) for url in servers.urls]
    return Speed(min(one.tokens_s for one in found), max(one.tokens_per_word for one in found))


def _speed(url: str, servers: ServerSet) -> Speed:
    words = 64
    _, tokens = _timed(url, servers.model, words)
    while True:
        seconds, tokens = min(_timed(url, servers.model, words) for _ in range(2))
        if seconds >= ENOUGH_S or 4 * tokens > CONTEXT_SHARE * servers.max_model_len:
            return Speed(tokens / seconds, tokens / words)
        words *= 4


def _timed(url: str, model: str, words: int) -> tuple[float, int]:
    """Seconds until the first token of a prompt that no cache has, and the prompt's tokens."""
    text = piece_text(Piece(secrets.randbits(64), words)).decode()
    asked = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    begin = time.monotonic()
    try:
        response = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60, trust_env=False)
        response.raise_for_status()
        return time.monotonic() - begin, int(response.json()["usage"]["prompt_tokens"])
    except httpx.HTTPStatusError:
        raise UnfitError(f"{url}/v1/chat/completions answers {response.status_code}: {response.text[:200]}") from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise UnfitError(f"{url}/v1/chat/completions: {error or type(error).__name__}") from None


def words_of(speed: Speed, max_model_len: int, pace: float) -> float:
    """How many times the lengths that are told. Raises UnfitError."""
    room = (CONTEXT_SHARE * max_model_len - TEMPLATE_TOKENS) / LONGEST
    words = min(speed.tokens_s / ONE_CORE_TOKENS_S * pace, room, MOST_WORDS) / speed.tokens_per_word
    if words < LEAST_WORDS:
        raise UnfitError(
            f"{max_model_len:,} tokens of context at {speed.tokens_s:,.0f} tokens a second: too short or slow"
        )
    return words


def measured(servers: ServerSet, names: Sequence[str], pace: float, say: Callable[[str], None]) -> dict[str, Cell]:
    """The cells of these names for these servers, seconds times `pace`. Raises UnfitError, TrialError."""
    speed = speed_of(servers)
    words = words_of(speed, servers.max_model_len, pace)
    say(f"{speed.tokens_s:,.0f} tokens of a prompt a second, {speed.tokens_per_word:.2f} a word; lengths x{words:.2f}")
    full: dict[str, tuple[float, float]] = {}
    """By who asks: overload is of the same users as another cell."""
    cells = {}
    for name in names:
        told = CELLS[name]

        def made(users: float, told: Cell = told) -> Cell:
            return sized(told, users=users, words=words, pace=pace, tokens_per_word=speed.tokens_per_word)

        who = str(told.kinds)
        if who not in full:
            full[who] = _full(made, servers, 2 * max((one for one, _ in full.values()), default=2.0))
        times, most_per_s = full[who]
        cells[name] = replace(made(times * told.load), most_per_s=most_per_s)
        users = sum(one.users for one in cells[name].kinds.values())
        say(f"{name}: {users} users, {told.load:g} of what the servers can serve")
    return cells


def _full(made: Callable[[float], Cell], servers: ServerSet, guess: float) -> tuple[float, float]:
    """How many times the users of a cell the servers can serve, and their responses a second."""
    one, again, words = made(1), iter(range(2, 99)), secrets.randbits(60)
    seconds = response_s(one, asked(one, servers, 1, words))
    at_leisure = sum(who.users / (who.think_s + seconds[kind]) for kind, who in one.kinds.items())
    while True:
        done = rate(_calls(asked(made(guess), servers, next(again), words)))
        if done < FULL * guess * at_leisure:
            return done / at_leisure, done
        guess *= GROWTH
        if guess * sum(who.users for who in one.kinds.values()) > MOST_USERS:
            raise UnfitError(f"{done:.0f} responses a second do not fill them, and one client has no more users")


def asked(cell: Cell, servers: ServerSet, seed: int, words: int) -> Answer:
    """A short run without a router. Raises UnfitError, TrialError."""
    short = replace(cell, warm_up_s=STEP_S / 3, duration_s=STEP_S)
    answer = ask_client(CLIENT, request_of("calibration", short, servers, seed=seed, port=0, words=words))
    failures = [call["failure"] for call in _calls(answer) if call["failure"]]
    if len(failures) > len(_calls(answer)) / 100:
        raise UnfitError(
            f"without a router, {len(failures)} of {len(_calls(answer))} requests fail: {failures[0][:200]}"
        )
    return answer


def request_of(name: str, cell: Cell, servers: ServerSet, *, seed: int, port: int, words: int) -> RecordedRequest:
    """For the client's process."""
    return RecordedRequest(
        cell=name,
        seed=seed,
        short=False,
        trace=None,
        port=port,
        servers=servers.urls,
        asks=orjson.loads(orjson.dumps(asdict(cell))),
        model=servers.model,
        words=words,
    )


def _calls(answer: Answer) -> list[Call]:
    return [call for phase in answer["phases"] for call in phase]


def response_s(cell: Cell, answer: Answer) -> dict[str, float]:
    """The mean time of a response, by kind of user; of a kind that asked nothing, that of all."""
    times: dict[str, list[float]] = {kind: [] for kind in cell.kinds}
    for call in _calls(answer):
        times[kind_of(cell, call["id"])].append(call["ended"])
    every = [one for some in times.values() for one in some]
    return {kind: sum(some or every) / len(some or every) for kind, some in times.items()}


def rate(calls: Sequence[Call]) -> float:
    """Responses a second in the middle half of them: neither the begin, nor the last ones, that have servers to
    themselves.
    """
    ends = sorted(call["due"] + call["ended"] for call in calls)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / max(1e-3, ends[last] - ends[first])
