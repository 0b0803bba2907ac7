# SPDX-License-Identifier: Apache-2.0
"""Traffic with the statistics that others published of theirs, made of few pieces: when sessions begin, how many
requests they have, how long texts and responses are, and which system prompts they share.

A prompt is one of the system prompts, all that its session said before, responses included, and a new text. Lengths are
lognormal, and so are the times from a request to the next of its session. What a source says of whole prompts holds for
what comes out (the tests say how nearly); how it divides into system prompts and texts is chosen so that it does.
An open loop: a session goes on though its response may not have ended, as in a replay.

Sources, all read in November 2026:

- Mooncake, tools and agents (FAST '25, table 2; kvcache-ai/Mooncake): 23,608 requests in an hour, prompts of 8,596
  tokens, responses of 182, 59 % of the prompts cached. Of the file, by two surveys of 2026-09: median prompt 6,346,
  99th percentile 61,600; median response 30, 90th percentile 507; 55 % known from earlier prompts; three first blocks
  have 46, 39 and 15 % of the requests. No source divides the rest of what is known: it is taken to be sessions.
- Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon; USENIX ATC '25, arXiv 2506.02634), two hours each of chat
  (trace A), business (trace B), thinking and coder. Rates, lengths, sessions, times between their requests, and which
  part of the prompts earlier ones of the same session or others have: a survey of the files, 2026-09-29. The paper
  has 62 and 54 % for the first two; the survey 58 and 54 %. How sessions begin is not published: Poisson.
- BurstGPT (KDD '25, arXiv 2401.17644): times between requests follow a gamma distribution, of the shape 0.5 where the
  paper evaluates. Lengths and sessions of BurstGPT_3: surveys of 2026-09. Nothing is said about contents.
- Chutes (arXiv 2608.13573, HarvardMadSys/chutes_workload), a week of each of two models: requests, sessions, turns,
  tokens in, and the share that earlier requests of the session sent. A model has servers of its own, so each is a
  workload. 99 % of follow-ups come within 15 minutes. Responses: the 19 that the repository prints. What it says
  about users are pictures only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from lbproxy.sim.workloads.prompts import Piece
from lbproxy.sim.workloads.workload import (
    Arrival,
    Job,
    OpenLoop,
    fresh_ids,
    lognormal,
    popularity,
    renewals,
)


class Spread(NamedTuple):
    """A lognormal distribution."""

    median: float
    sigma: float
    most: int = 120_000
    """Longer draws are cut to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Sessions of one kind. Tokens; seconds."""

    share: float = 1.0
    """Of all sessions; the shares of a traffic's kinds need not add up to 1."""
    text: Spread
    """What the first request of a session adds to the system prompt."""
    more: Spread | None = None
    """What each later one adds to what was said before; None = as much."""
    response: Spread
    heads: int = 0
    """System prompts; 0 = none."""
    head: Spread | None = None
    """The length of one."""
    skew: float = 0.0
    """Popularity of the n-th system prompt: n to the power of minus this."""
    singles: float = 1.0
    """Share of sessions with a single request."""
    requests: float = 1.0
    """Mean of a session."""
    gap_s: Spread | None = None
    """From a request of a session to the next; None = all sessions have a single one."""

    def goes_on(self, sent: int) -> float:
        """How likely a session that has sent so many requests sends another, so that `requests` are the mean."""
        return 1 - (self.singles if sent == 1 else (1 - self.singles) / (self.requests - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTraffic:
    """What arrives at one service."""

    of: str
    """Whose it is, for users."""
    rate: float
    """Requests a second, once sessions of every age are there."""
    shape: float = 1.0
    """Of the gamma distribution of times between first requests; 1 = Poisson, less = bursts."""
    kinds: tuple[Kind, ...]
    longest: int = 1_000_000
    """A session that would grow beyond so many tokens ends."""


def generate(traffic: ServiceTraffic, *, seed: int, speedup: float, max_context: int, duration_s: float) -> OpenLoop:
    """`duration_s` of it, `speedup` times as fast, with sessions of at most `max_context` tokens."""
    rng = random.Random(f"{seed}:{traffic.of}")
    # A service's system prompts are the same for every seed.
    fixed = random.Random(traffic.of)
    ids = fresh_ids()
    shares = [kind.share for kind in traffic.kinds]
    numbers = count()
    heads = [
        [Piece(next(numbers), _draw(fixed, kind.head)) for _ in range(kind.heads)] if kind.head else []
        for kind in traffic.kinds
    ]
    weights = [popularity(len(of), kind.skew) for of, kind in zip(heads, traffic.kinds, strict=True)]
    requests = sum(kind.share * kind.requests for kind in traffic.kinds) / sum(shares)
    lasts_s, longest = duration_s * speedup, min(traffic.longest, max_context)
    arrivals: list[Arrival] = []
    for number, at in enumerate(renewals(rng, traffic.rate / requests, lasts_s, traffic.shape)):
        (which,) = rng.choices(range(len(shares)), shares)
        head = rng.choices(heads[which], cum_weights=weights[which]) if heads[which] else []
        session = _session(traffic.kinds[which], str(number), tuple(head), rng, ids)
        for later_s, job in session:
            if at + later_s >= lasts_s or job.prompt_tokens + job.answer.tokens > longest:
                break
            arrivals.append(((at + later_s) / speedup, job))
    return OpenLoop([sorted(arrivals, key=lambda arrival: arrival[0])])


def _session(
    kind: Kind, name: str, head: tuple[Piece, ...], rng: random.Random, ids: Callable[[], int]
) -> Iterator[Arrival]:
    """Its requests, at seconds after its first."""
    said, at, sent = head, 0.0, 0
    while True:
        sent += 1
        said = (*said, Piece(ids(), _draw(rng, kind.more if sent > 1 and kind.more else kind.text)))
        response = Piece(ids(), _draw(rng, kind.response))
        yield at, Job(f"{name}-{sent}", said, response, session=name)
        if kind.gap_s is None or rng.random() >= kind.goes_on(sent):
            return
        said = (*said, response)
        at += kind.gap_s.median * rng.lognormvariate(0.0, kind.gap_s.sigma)


def _draw(rng: random.Random, spread: Spread) -> int:
    return lognormal(rng, spread.median, spread.sigma, at_most=spread.most)


TRAFFIC: Mapping[str, ServiceTraffic] = {
    "toolagent": ServiceTraffic(
        of="Mooncake's tools and agents",
        rate=6.67,
        kinds=(
            Kind(
                share=0.6,
                text=Spread(480, 1.58),
                response=Spread(18, 0.6),
                heads=2,
                head=Spread(5500, 0.1),
                singles=0.7,
                requests=1.44,
                gap_s=Spread(123, 1.4),
            ),
            Kind(
                share=0.4,
                text=Spread(3850, 1.23),
                response=Spread(380, 0.5),
                heads=1,
                head=Spread(512, 0),
                singles=0.7,
                requests=1.44,
                gap_s=Spread(123, 1.4),
            ),
        ),
    ),
    "bailian-chat": ServiceTraffic(
        of="Qwen-Bailian's chat",
        rate=5.98,
        kinds=(
            Kind(
                text=Spread(270, 1.36),
                response=Spread(375, 0.6),
                heads=40,
                head=Spread(290, 0.44),
                skew=1.1,
                singles=0.61,
                requests=1.862,
                gap_s=Spread(110.6, 1.46),
            ),
        ),
    ),
    "bailian-business": ServiceTraffic(
        of="Qwen-Bailian's business",
        rate=24.0,
        kinds=(
            Kind(
                text=Spread(230, 1.15),
                response=Spread(39, 1.35),
                heads=60,
                head=Spread(240, 1.2),
                skew=0.52,
            ),
        ),
    ),
    "bailian-thinking": ServiceTraffic(
        of="Qwen-Bailian's thinking",
        rate=1.5,
        longest=80_000,
        kinds=(
            Kind(
                text=Spread(1880, 0.8),
                more=Spread(105, 1.15),
                response=Spread(1665, 1.3),
                heads=20,
                head=Spread(1640, 0.28),
                skew=0.6,
                singles=0.947,
                requests=1.125,
                gap_s=Spread(28.6, 1.7),
            ),
        ),
    ),
    "bailian-coder": ServiceTraffic(
        of="Qwen-Bailian's coder",
        rate=5.97,
        longest=16_000,
        kinds=(
            Kind(
                text=Spread(1130, 1.0),
                more=Spread(615, 1.85),
                response=Spread(469, 1.06),
                heads=20,
                head=Spread(2820, 0.43),
                skew=0.76,
                singles=0.747,
                requests=1.629,
                gap_s=Spread(117.7, 1.62),
            ),
        ),
    ),
    "burstgpt": ServiceTraffic(
        of="BurstGPT's bursts",
        rate=0.565,
        shape=0.5,
        kinds=(
            Kind(share=0.956, text=Spread(326, 0.8), response=Spread(14, 1.75, 4000)),
            Kind(
                share=0.0105,
                text=Spread(240, 1.0),
                more=Spread(60, 1.2),
                response=Spread(187, 0.9),
                singles=0.355,
                requests=4.18,
                gap_s=Spread(127, 2.29),
            ),
        ),
    ),
    "chutes-deepseek": ServiceTraffic(
        of="Chutes' DeepSeek V3.2",
        rate=11.9,
        kinds=(
            Kind(share=0.3, text=Spread(20_500, 0.8), response=Spread(190, 0.6)),
            Kind(
                share=0.7,
                text=Spread(3960, 1.0),
                more=Spread(1000, 1.0),
                response=Spread(190, 0.6),
                singles=0.153,
                requests=3.73,
                gap_s=Spread(60, 1.16),
            ),
        ),
    ),
    "chutes-minimax": ServiceTraffic(
        of="Chutes' MiniMax M2.5",
        rate=6.98,
        kinds=(
            Kind(share=0.25, text=Spread(64_000, 0.8), response=Spread(190, 0.6)),
            Kind(
                share=0.75,
                text=Spread(7350, 0.72),
                more=Spread(4400, 1.0),
                response=Spread(190, 0.6),
                singles=0.144,
                requests=4.88,
                gap_s=Spread(60, 1.16),
            ),
        ),
    ),
}
"""By the name that scenarios use."""
