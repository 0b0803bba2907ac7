"""Where each session was last: a hint at which endpoint has something of a prompt that its own keys do not show.

A client may name the session that a request belongs to (`x-session-id`, the fields of Codex and Claude Code,
`prompt_cache_key`). Where prompts can be read, the index of prefixes knows better. Where their keys do not match, as
after a coding agent replaced its conversation by a summary, or where there are none, the endpoint of the session's last
request gets credit for a share of the prompt. Hashing sessions to endpoints was measured to collapse under load
(prime-rl issue 3255: hit rate 98 -> 5 %), so this is never more than a lower price.

How large the share is, is learned from `cached_tokens`: what engines report overrules the hint. Invariants: bounded,
the session that was used longest ago is forgotten first; an endpoint that lost its cache is nobody's home.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from lbproxy.core.caches.prefix_index import EndpointCache

MAX_SESSIONS: Final = 50_000
"""Some 300 bytes each."""
FIRST_TRUST: Final = 0.1
"""Before anything is reported: enough to decide between endpoints that are alike."""
STEP: Final = 0.05
KNOWN: Final = 0.5
"""Where the keys match so much of what the session had, they are believed and not the hint."""


class Home:
    """Where a session was last, and how long its prompt was then, in tokens."""

    __slots__ = ("cache", "tokens")

    def __init__(self, cache: EndpointCache, tokens: float) -> None:
        self.cache = cache
        self.tokens = tokens

    def beyond(self, prompt: float, matched: float) -> float:
        """Tokens of a prompt that may be cached there though the keys match only so many. 0 where they match well."""
        most = min(prompt, self.tokens)
        return most - matched if matched < KNOWN * most else 0.0


class Sessions:
    """The homes of the sessions that were used last."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, Home] = OrderedDict()
        self.trust = FIRST_TRUST
        """Which share of what a home may have was there, of late."""

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._homes)

    def home(self, session: str) -> Home | None:
        """None: the session is new, or its home lost its cache."""
        found = self._homes.get(session)
        return found if found is not None and found.cache.attached else None

    def placed(self, session: str, cache: EndpointCache, tokens: float) -> None:
        """A request of the session, with a prompt of so many tokens, goes to the endpoint with this cache."""
        self._homes[session] = Home(cache, tokens)
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)

    def learn(self, beyond: float, found: float) -> None:
        """Of so many tokens that a home might have had beside what keys matched, so many were cached."""
        share = min(1.0, max(0.0, found / beyond))
        self.trust += STEP * (share - self.trust)
