# SPDX-License-Identifier: Apache-2.0
"""Ollama's lists of models, /api/tags and /api/ps: those of all endpoints that have its API and are up, as one.

They are asked at once, and what they said is kept for `KEPT_S`: clients ask every few seconds, each of them. An
endpoint that does not answer in `TIMEOUT_S` is left out.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any, Final

import orjson

from lbproxy.config.sections.engines import OLLAMA
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointState
from lbproxy.core.requests.models import Allowed, ModelRules, is_among
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import is_light
from lbproxy.core.requests.retry import UpstreamError
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.net.connections.fetch import fetch
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.above import below
from lbproxy.net.dialing.origin import Origin

KEPT_S: Final = 1.0
TIMEOUT_S: Final = 2.0
MAX_LIST_BYTES: Final = 4 << 20
Entry = dict[str, Any]


class _List:
    """One of the two."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.entries: list[Entry] | None = []
        """None: nobody answered."""
        self.until = -inf


class OllamaLists:
    """Both lists. All clients share what is kept."""

    def __init__(self, runtime: RequestRuntime, connections: ConnectionPool) -> None:
        self._runtime, self._connections = runtime, connections
        self._lists = {"/api/tags": _List(), "/api/ps": _List()}

    async def body(self, path: str, rules: ModelRules, allowed: tuple[Allowed, ...]) -> bytes:
        """The body for a client that may use `allowed`. Raises LbError."""
        members = {one.endpoint.url_key: one for one in self._runtime.members() if one.has_api(OLLAMA)}
        if not members:
            raise LbError(Outcome.UNKNOWN_URL)
        kept = self._lists[path.rstrip("/")]
        async with kept.lock:
            if self._runtime.now() >= kept.until:
                up = [one for one in members.values() if one.health is Health.UP and not (one.draining or one.dormant)]
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(self._ask(one, path.rstrip("/"))) for one in up]
                answers = [found for task in asked if (found := task.result()) is not None]
                kept.entries = _merged(answers) if answers else None
                kept.until = self._runtime.now() + KEPT_S
            entries = kept.entries
        if entries is None:
            raise LbError(Outcome.NO_ENDPOINTS)
        if path.startswith("/api/tags"):
            entries = [*_aliases(entries, rules), *entries]
        seen = [one for one in entries if all(is_among(one["name"], each) for each in allowed)]
        return orjson.dumps({"models": seen})

    async def _ask(self, state: EndpointState, path: str) -> list[Entry] | None:
        """What one endpoint lists, of what it serves here; None: it did not say."""
        endpoint = state.endpoint
        origin, target = Origin.parse(endpoint.base_url, endpoint.tls, endpoint.proxy), below(endpoint.base_url, path)
        limits = {"timeout_s": TIMEOUT_S, "max_bytes": MAX_LIST_BYTES}
        try:
            answer = await fetch(self._connections, origin, target, key=endpoint.api_key, **limits)  # type: ignore[arg-type]
            said = orjson.loads(answer.body) if answer.status == 200 and is_light(answer.body) else None
        except (UpstreamError, orjson.JSONDecodeError):
            return None
        models = said.get("models") if isinstance(said, dict) else None
        if not isinstance(models, list):
            return None if said is None else []
        named = [one for one in models if isinstance(one, dict) and isinstance(one.get("name"), str)]
        return [one for one in named if state.models is None or is_among(one["name"], state.models)]


def _merged(answers: list[list[Entry]]) -> list[Entry]:
    """Each model once, as the first says; one that is loaded with several lengths of context with each."""
    found: dict[tuple[str, object], Entry] = {}
    for one in (entry for entries in answers for entry in entries):
        context = one.get("context_length")
        found.setdefault((one["name"], context if isinstance(context, int) else None), one)
    return list(found.values())


def _aliases(entries: list[Entry], rules: ModelRules) -> list[Entry]:
    by_name = {one["name"]: one for one in entries}
    found = []
    for alias in rules.aliases():
        behind = next((by_name[model] for model in rules.behind(alias) if model in by_name), None)
        if behind is not None and alias not in by_name:
            found.append(behind | {"name": alias, "model": alias})
    return found
