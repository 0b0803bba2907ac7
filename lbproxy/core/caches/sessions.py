# SPDX-License-Identifier: Apache-2.0
"""Where the last request of each session was placed: it may be cached there although its keys do not show that.

A client may name the session of a request (`x-session-id`, the fields of Codex and Claude Code, `prompt_cache_key`).
Where prompts can be read, the prefix index is more exact. Where their keys do not match, as after a coding agent
replaced its conversation by a summary, or where there are none, the endpoint of the session's last request is credited
with a share of the prompt. Hashing sessions to endpoints was measured to collapse under load (prime-rl issue 3255: hit
rate 98 -> 5 %), so this is never more than a reduction of the price.

The share is learned from `cached_tokens`: what engines report overrules the prediction. Invariants: bounded, the least
recently used session is forgotten first; an endpoint that lost its cache is no session's home.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from lbproxy.core.caches.prefix_index import EndpointCache

MAX_SESSIONS = 50_000
"""Some 300 bytes each."""
FIRST_TRUST: Final = 0.1
"""Before anything is reported: enough to decide between endpoints that are equal otherwise."""
TRUST_STEP: Final = 0.05
KNOWN_SHARE: Final = 0.5
"""Where the keys match this share of a prompt, or of the session's last prompt, only the keys count: sub-agents have
the session of their parent, and their tools and system prompt are cached everywhere."""


class Home:
    """Where the last request of a session was placed, and how long its prompt was, in tokens."""

    __slots__ = ("cache", "expected", "request_id", "tokens")

    def __init__(self, cache: EndpointCache, tokens: float, request_id: str, expected: float) -> None:
        self.cache = cache
        self.tokens = tokens
        self.request_id = request_id
        self.expected = expected
        """Tokens of its prompt that may have been cached there in addition to those that its keys matched."""

    def unmatched_tokens(self, prompt: float, matched: float) -> float:
        """Tokens of a prompt that may be cached there although the keys match only `matched`. 0 where they match
        well.
        """
        most = min(prompt, self.tokens)
        return most - matched if matched < KNOWN_SHARE * most else 0.0


class Sessions:
    """The homes of the sessions that were used last."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, Home] = OrderedDict()
        self.trust = FIRST_TRUST
        """The share of the expected tokens that was found in the home's cache recently."""

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: str) -> Home | None:
        """The home of a session; None: the session is new, or its home lost its cache."""
        found = self._homes.get(session)
        return found if found is not None and found.cache.attached else None

    def placed(self, session: str, request_id: str, cache: EndpointCache, prompt: float, matched: float) -> None:
        """Note that a request of the session is placed at this cache's endpoint, where `matched` tokens of its prompt
        match.
        """
        home = self._homes.get(session)
        expected = home.unmatched_tokens(prompt, matched) if home is not None and home.cache is cache else 0.0
        self._homes[session] = Home(cache, prompt, request_id, expected)
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)

    def learn(self, session: str, request_id: str, found: float) -> None:
        """Learn from `found` tokens that were cached in addition to those that the keys matched. Only the latest
        request of a session counts, and only if it was placed at the session's home.
        """
        home = self._homes.get(session)
        if home is not None and home.request_id == request_id and home.expected > 0.0:
            share = min(1.0, max(0.0, found / home.expected))
            self.trust += TRUST_STEP * (share - self.trust)
