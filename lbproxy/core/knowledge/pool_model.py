"""What all endpoints have in common: rates, the prefix index, which models are adapters, how many requests are held.

Each endpoint's own is in `core.knowledge.load_model`, which also does the learning here. Policies only read.
"""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Final

from mypy_extensions import mypyc_attr

from lbproxy.core.caches.adapters import LoadTimes
from lbproxy.core.caches.cache_size import Size
from lbproxy.core.caches.prefix_index import MAX_ENTRIES, PrefixIndex
from lbproxy.core.caches.sessions import Sessions
from lbproxy.core.capacity.others import Mean
from lbproxy.core.capacity.unread import Sizes, Unread
from lbproxy.core.knowledge.gaps import PoolGaps
from lbproxy.core.knowledge.learning import Samples, clip
from lbproxy.core.knowledge.prefill_work import work_tokens
from lbproxy.core.requests.media import FILLER_BYTES
from lbproxy.core.requests.outline import KEPT_BYTES
from lbproxy.core.requests.request import InferenceRequest, Usage

MEDIA_STEP: Final = 0.1
LEAST_MEDIA_SCALE: Final = 0.02
MOST_MEDIA_SCALE: Final = 20.0


@mypyc_attr(allow_interpreted_subclasses=True)  # the simulation has one
class PoolModel:
    """What the endpoints have in common, and the models of all of them."""

    def __init__(self, block_bytes: int, index_entries: int = MAX_ENTRIES) -> None:
        self.index = PrefixIndex(block_bytes, index_entries)
        self.adapters: Set[str] = frozenset()
        """The models that are LoRA adapters. `core.endpoints.serving` owns the set and keeps it current."""
        self.token_ms = 0.1
        """Prefill time per uncached token (rG)."""
        self.output_tokens = 200.0
        """Mean length of a response (O)."""
        self.hit_ratio = 0.3
        """Share of prompt tokens that was predicted to be cached (hr)."""
        self.bytes_per_token = 4.0
        """Of flattened prompts (f)."""
        self.work_tokens = 500.0
        """Mean prefill work of a request."""
        self.load_times = LoadTimes()
        """To load an adapter."""
        self.base_ms = 40.0
        """Time to the first token that does not depend on the prompt (T0), of the endpoints that served of late."""
        self.gaps = PoolGaps(15.0, 1e-4)
        self.gap_ms, self.gap_per_token_ms = self.gaps.gap_ms, self.gaps.gap_per_token_ms
        """Inter-token gap of all endpoints together: what those without samples are taken to have."""
        self.size = Size()
        """Of the KV caches whose size is not told, as if all were alike: what their space is priced by. An endpoint of
        which more is known than of another must not look cheaper for that."""
        self.held = 0
        """Requests that are held for any of the endpoints."""
        self.overloaded = False
        """The newest of them go first (`core.queue.overload`)."""
        self.unread, self.sizes = Unread(), Sizes()
        """How long requests take whose work cannot be read, and what their size matters."""
        self.sessions = Sessions()
        """Where sessions were that clients name."""
        self.media_scale = 1.0
        """What engines count for images and the like, beside what is estimated (`core.requests.media`)."""
        self.reports_cached = False
        """Some response said how much of its prompt was cached."""
        self.turn_share = -1.0
        """How much of these goes before the request that is priced, as a share; below 0: what has less work does."""
        self.others = Mean()
        """What others have at an endpoint, of those that report it."""
        self.samples = Samples()
        self._seen_bytes, self._seen_tokens = 8000.0, 2000.0

    def prompt_tokens(self, request: InferenceRequest) -> float:
        """How long its prompt is; at least 1."""
        if request.media_tokens:
            text_bytes = request.prompt_bytes - FILLER_BYTES * request.media_tokens
            return max(1.0, text_bytes / self.bytes_per_token + self.media_scale * request.media_tokens)
        tokens = request.prompt_bytes / self.bytes_per_token
        return tokens if tokens > 1.0 else 1.0

    def block_tokens(self, request: InferenceRequest) -> float:
        """How many of them a block of it has, on average."""
        if request.media_tokens:
            return self.prompt_tokens(request) * self.index.block_bytes / request.prompt_bytes
        return self.index.block_bytes / self.bytes_per_token

    def least_work(self, request: InferenceRequest) -> float:
        """The least prefill work, in tokens, that any endpoint has with the request."""
        cached = self.index.longest(request.block_keys) * self.block_tokens(request)
        return work_tokens(max(1.0, self.prompt_tokens(request) - cached), cached)

    def learn_usage(self, request: InferenceRequest, usage: Usage) -> None:
        """What the endpoint counted: how many bytes make a token, and what images count."""
        tokens = usage.prompt_tokens or 0
        self.reports_cached = self.reports_cached or usage.cached_tokens is not None
        if request.media_tokens:
            self._learn_media(request, tokens)
        elif request.body_bytes <= KEPT_BYTES and request.is_text(tokens):  # of larger ones only parts are read
            self._seen_bytes = 0.98 * self._seen_bytes + request.prompt_bytes
            self._seen_tokens = 0.98 * self._seen_tokens + tokens
            self.bytes_per_token = self._seen_bytes / self._seen_tokens
            self.samples.bytes_per_token += 1

    def _learn_media(self, request: InferenceRequest, tokens: int) -> None:
        """A prompt with images took so many tokens: those that its text does not explain are theirs."""
        text_tokens = (request.prompt_bytes - FILLER_BYTES * request.media_tokens) / self.bytes_per_token
        seen = (tokens - text_tokens) / request.media_tokens
        if seen > 0.0:
            self.media_scale *= math.exp(MEDIA_STEP * math.log(clip(seen / self.media_scale, 0.1, 10.0)))
            self.media_scale = clip(self.media_scale, LEAST_MEDIA_SCALE, MOST_MEDIA_SCALE)
