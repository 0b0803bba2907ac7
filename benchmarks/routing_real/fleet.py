# SPDX-License-Identifier: Apache-2.0
"""The servers as routers see them, and what they say of themselves: model, version, caches.

They were started by somebody, and go on running, or by `servers.py`. Whatever would spoil the figures of all runs is
found here, before the first: `UnfitError` has one line that says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict
from urllib.parse import urlsplit

import httpx

from tests.real.servers import LlmServer, sum_of

PATIENCE_S = 10.0
CACHE = re.compile(r'vllm:cache_config_info\{(?=.*block_size="(\d+)")(?=.*num_gpu_blocks="(\d+)")')
NEEDED = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:request_success_total")
SIMULATED = "lbproxy_mock_"
"""Begins what only the metrics of a simulated server have."""


class UnfitError(Exception):
    """These servers cannot be measured; the text says why."""


class Facts(TypedDict):
    """What the servers of a page are."""

    count: int
    model: str
    engine: str
    """With its version."""
    hardware: str
    cache_tokens: int | None
    """Of each prefix cache."""
    max_model_len: int
    more: str
    """Options that matter; empty: unknown."""
    emptied: bool
    """Caches are, before each run; else the words of each run are its own."""
    shared: bool
    """All are on one GPU."""


@dataclass(frozen=True, slots=True)
class ServerSet:
    """The servers of a run."""

    urls: list[str]
    """Each `http://HOST:PORT`."""
    model: str
    """As requests name it."""
    max_model_len: int
    started: Sequence[LlmServer] = ()
    """By us: their caches can be emptied, their CPU time is known. Else none."""


class _Card(NamedTuple):
    """Of /v1/models."""

    model: str
    root: str
    """The model's own name, or its folder."""
    max_model_len: int


def look(urls: Sequence[str], hardware: str | None) -> tuple[ServerSet, Facts]:
    """See whether they can be compared routers before. Raises UnfitError."""
    found = list(dict.fromkeys(map(_address, urls)))
    if len(found) < 2:
        raise UnfitError(
            f"at least two servers, at different URLs, not {' '.join(urls)}: between one there is no choice"
        )
    cards = {url: _card(url) for url in found}
    if len({card.model for card in cards.values()}) > 1:
        raise UnfitError(
            f"the servers have different models: {', '.join(f'{url} {one.model}' for url, one in cards.items())}"
        )
    pages = [_metrics(url) for url in found]
    versions = sorted({_version(url) for url in found})
    tokens = [int(one[1]) * int(one[2]) for page in pages if (one := CACHE.search(page))]
    card, longest = cards[found[0]], min(card.max_model_len for card in cards.values())
    simulated = any(SIMULATED in page for page in pages)
    facts = Facts(
        count=len(found),
        model=card.root,
        engine=f"vLLM {' and '.join(versions)}",
        hardware="no GPU (they are simulated: `lbproxy mock`)"
        if simulated
        else hardware or "hardware that nobody named",
        cache_tokens=min(tokens) if len(tokens) == len(found) else None,
        max_model_len=longest,
        more="",
        emptied=False,
        shared=False,
    )
    return ServerSet(found, card.model, longest), facts


def _address(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/") or parts.query:
        raise UnfitError(f"{url}: a server is given as http://HOST:PORT")
    return f"http://{parts.hostname}:{port}"


def get(url: str) -> httpx.Response:
    """A page of a server, whatever its status. Raises UnfitError if there is none."""
    try:
        response = httpx.get(url, timeout=PATIENCE_S, trust_env=False)
    except httpx.HTTPError as error:
        raise UnfitError(
            f"{url}: {error or type(error).__name__}: is the server up, and does it listen on --host?"
        ) from None
    if response.status_code in (401, 403):
        raise UnfitError(f"{url} wants a key ({response.status_code}): start the server without --api-key")
    return response


def _card(url: str) -> _Card:
    response = get(f"{url}/v1/models")
    try:
        base, *_ = [card for card in response.raise_for_status().json()["data"] if not card.get("parent")]
        return _Card(str(base["id"]), str(base.get("root") or base["id"]), int(base["max_model_len"]))
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        what = f"{url}/v1/models ({response.status_code}) names no model with its max_model_len"
        raise UnfitError(f"{what}: is it vLLM?") from None


def _version(url: str) -> str:
    try:
        return str(get(f"{url}/version").json()["version"])
    except (ValueError, LookupError, TypeError):
        return "of unknown version"


def _metrics(url: str) -> str:
    """Its page of metrics."""
    response = get(f"{url}/metrics")
    missing = [name for name in NEEDED if response.status_code != 200 or f"\n{name}{{" not in f"\n{response.text}"]
    if missing:
        raise UnfitError(f"{url}/metrics ({response.status_code}) has no {missing[0]}, of which hits are: is it vLLM?")
    if busy := under_way(response.text):
        raise UnfitError(f"{url} has {busy:.0f} requests of somebody else: measure idle servers")
    return response.text


def under_way(page: str) -> float:
    """Requests that run or wait, of a page of metrics."""
    return sum_of(page, "vllm:num_requests_running") + sum_of(page, "vllm:num_requests_waiting")
