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

MAX_SESSIONS = 50_000
"""Some 300 bytes each."""
FIRST_TRUST: Final = 0.1
"""Before anything is reported: enough to decide between endpoints that are alike."""
STEP: Final = 0.05
KNOWN: Final = 0.5
"""Where the keys match so much of a prompt, or of what the session had, they count and not the hint: sub-agents have
their parent's session, and their tools and system prompt are cached everywhere."""


class Home:
    """Where a session was last, and how long its prompt was then, in tokens."""

    __slots__ = ("cache", "expected", "request_id", "tokens")

    def __init__(self, cache: EndpointCache, tokens: float, request_id: str, expected: float) -> None:
        self.cache = cache
        self.tokens = tokens
        self.request_id = request_id
        """Of the request that was placed there."""
        self.expected = expected
        """Tokens of its prompt that might have been cached there beside those that its keys matched."""

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

    def placed(self, session: str, request_id: str, cache: EndpointCache, prompt: float, matched: float) -> None:
        """A request of the session goes to the endpoint with this cache, where so many tokens of its prompt match."""
        home = self._homes.get(session)
        expected = home.beyond(prompt, matched) if home is not None and home.cache is cache else 0.0
        self._homes[session] = Home(cache, prompt, request_id, expected)
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)

    def learn(self, session: str, request_id: str, found: float) -> None:
        """So many tokens were cached beside those that the request's keys matched. Counts for the latest request of a
        session, if it went home.
        """
        home = self._homes.get(session)
        if home is not None and home.request_id == request_id and home.expected > 0.0:
            share = min(1.0, max(0.0, found / home.expected))
            self.trust += STEP * (share - self.trust)
