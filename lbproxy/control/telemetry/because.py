# SPDX-License-Identifier: Apache-2.0
"""Why an endpoint was chosen, in words.

Pure: a decision in, a clause out. Of the chosen candidate and the next best, the part of the cost that differs most is
the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lbproxy.core.policies.adaptive import COPY
from lbproxy.core.policies.explain import Decision
from lbproxy.core.queue.ticket import Overflow

LESS: Final[Mapping[str, str]] = {
    "base": "the first token of any prompt comes sooner than from {}",
    "wait": "a request waits less there than at {}",
    "prefill": "it computes the prompt sooner than {}",
    "stall": "the prompt delays fewer other responses than at {}",
    "decode": "its response is faster than from {}",
    "slow_down": "the request slows fewer other responses down than at {}",
    "cache_space": "storing the prompt there would displace less of what is cached than at {}",
    "space_wait": "its cache has space sooner than that of {}",
    "adapter": "the request waits less for its adapter than at {}",
    "transfer": "the KV cache of the prompt arrives sooner than at {}",
}
"""What it means that a part of the chosen one's cost is lower than that of the next best: `core.policies.adaptive`."""
CACHE_PARTS: Final = frozenset({"prefill", "cache_space"})
"""Parts in proportion to the tokens that are not cached, among other things."""
CACHED_SHARE: Final = 0.5
"""Cached tokens are the reason if, alone, they make at least this share of such a difference."""
_OVERFLOWS: Final[Mapping[Overflow, str]] = {
    Overflow.DOWN: "no endpoint of a lower tier took requests",
    Overflow.FAILED: "the endpoints of lower tiers had failed this request",
    Overflow.WAIT: "the wait in a lower tier was too long",
    Overflow.LIMIT: "the endpoints of lower tiers were at their limits for too long",
    Overflow.FULL: "a lower tier would have refused it",
    Overflow.DEADLINE: "a lower tier would have missed its deadline",
}
"""Why it went to its tier."""


def because(made: Decision, prompt_tokens: int | None) -> str:
    """Why the decision fell so. `prompt_tokens`: of the request, if they are known."""
    why = _among_candidates(made, prompt_tokens)
    return why if made.overflow is None else f"{_OVERFLOWS[Overflow(made.overflow)]}; {why}"


def _among_candidates(made: Decision, prompt_tokens: int | None) -> str:
    if made.cost is None or made.candidates == 1:
        return "it was the only one that could take it"
    limit = min(made.costs) + made.policy.tolerance
    if made.cost > limit:
        return "what would cost less would begin it later"
    alike = sum(cost <= limit for cost in made.costs)
    if alike == 1:
        reason = _advantage(made, prompt_tokens)
        return "it had the lowest cost" + ("" if reason is None else f": {reason}")
    many = f"{alike} or more" if alike == len(made.costs) < made.candidates else str(alike)
    if made.policy.tolerance:
        return f"{many} cost about the same, and it had gone longest without a request"
    return f"{many} cost the same, and it was drawn of these"


def _advantage(made: Decision, prompt_tokens: int | None) -> str | None:
    """What makes the chosen one better than the next best; None: not known."""
    costs, parts, chosen = made.costs, made.breakdown(), made.chosen_index
    others = [n for n in range(min(len(costs), len(parts))) if n != chosen]
    if not others or chosen >= len(parts) or "cost" in parts[chosen]:  # the policy has no parts
        return None
    following = min(others, key=costs.__getitem__)
    cached = made.cached_tokens()
    return advantage(
        parts[chosen],
        parts[following],
        following=made.shown[following].name,
        cached=(cached[chosen], cached[following]) if cached else (None, None),
        prompt_tokens=prompt_tokens,
    )


def advantage(
    chosen: Mapping[str, float],
    other: Mapping[str, float],
    *,
    following: str,
    cached: tuple[float | None, float | None] = (None, None),
    prompt_tokens: int | None = None,
) -> str | None:
    """The part of the cost by which `chosen` is furthest below `other`, in words; None: no part is lower.

    `following`: the other's name. `cached`: tokens of the prompt that are expected in the cache of each.
    """
    lower = {name: value - chosen.get(name, 0.0) for name, value in other.items()}
    name = max(lower, key=lower.__getitem__, default=None)
    if name is None or not lower[name] > 0.0:
        return None
    ours, theirs = cached
    if ours is not None and theirs is not None and ours > theirs and name in CACHE_PARTS:
        saved_share = lower[name] / other[name]
        times = COPY if name == "cache_space" else 1.0
        if _explains(ours, theirs, saved_share, prompt_tokens, times):
            return _of_the_prompt(ours, prompt_tokens)
    words = LESS.get(name)
    return f"less for `{name}` than {following}" if words is None else words.format(following)


def _explains(ours: float, theirs: float, saved_share: float, prompt_tokens: int | None, times: float) -> bool:
    """Whether that more is cached makes most of a difference. `saved_share`: of the other's part. `times`: as much does
    a token cost the other that is cached here as one that is not.
    """
    if prompt_tokens is None:
        return True
    if prompt_tokens <= theirs:
        return False
    ours = min(ours, prompt_tokens)
    more = times * (ours - theirs)
    return more / (more + prompt_tokens - ours) >= CACHED_SHARE * saved_share


def _of_the_prompt(cached: float, prompt_tokens: int | None) -> str:
    if prompt_tokens is None:
        return f"{cached:,.0f} tokens of the prompt are expected in its cache"
    return f"{min(cached, prompt_tokens):,.0f} of {prompt_tokens:,} prompt tokens are expected in its cache"
