"""What all endpoints have in common: rates, the prefix index, which models are adapters, how many requests are held.

Each endpoint's own is in `core.knowledge.load_model`, which also does the learning here. Policies only read.
"""

from __future__ import annotations

from collections.abc import Set

from mypy_extensions import mypyc_attr

from lbproxy.core.caches.adapters import LoadTimes
from lbproxy.core.caches.cache_size import Size
from lbproxy.core.caches.prefix_index import MAX_ENTRIES, PrefixIndex
from lbproxy.core.capacity.others import Mean
from lbproxy.core.capacity.unread import Unread
from lbproxy.core.knowledge.gaps import PoolGaps
from lbproxy.core.knowledge.learning import Samples
from lbproxy.core.knowledge.prefill_work import work_tokens
from lbproxy.core.requests.outline import KEPT_BYTES
from lbproxy.core.requests.request import InferenceRequest, Usage


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
        self.unread = Unread()
        """How long requests take whose work cannot be read."""
        self.turn_share = -1.0
        """How much of these goes before the request that is priced, as a share; below 0: what has less work does."""
        self.others = Mean()
        """What others have at an endpoint, of those that report it."""
        self.samples = Samples()
        self._seen_bytes, self._seen_tokens = 8000.0, 2000.0

    def least_work(self, request: InferenceRequest) -> float:
        """The least prefill work, in tokens, that any endpoint has with the request."""
        cached = self.index.longest(request.block_keys) * self.index.block_bytes / self.bytes_per_token
        return work_tokens(max(1.0, request.prompt_bytes / self.bytes_per_token - cached), cached)

    def learn_usage(self, request: InferenceRequest, usage: Usage) -> None:
        """What the endpoint counted: how many bytes make a token."""
        tokens = usage.prompt_tokens or 0
        if request.body_bytes <= KEPT_BYTES and request.is_text(tokens):  # of larger ones only parts are read
            self._seen_bytes = 0.98 * self._seen_bytes + request.prompt_bytes
            self._seen_tokens = 0.98 * self._seen_tokens + tokens
            self.bytes_per_token = self._seen_bytes / self._seen_tokens
            self.samples.bytes_per_token += 1
