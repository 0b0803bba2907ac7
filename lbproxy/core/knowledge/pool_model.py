# SPDX-License-Identifier: Apache-2.0
"""What all endpoints have in common: rates, the prefix index, which models are adapters.

What differs by endpoint is in `core.knowledge.load_model`, which also updates this. Policies only read.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict
from typing import Final

from mypy_extensions import mypyc_attr

from lbproxy.core.caches.adapters import LoadTimes
from lbproxy.core.caches.cache_size import SizeEstimate
from lbproxy.core.caches.prefix_index import MAX_ENTRIES, PrefixIndex
from lbproxy.core.caches.savings import Savings
from lbproxy.core.caches.sessions import Sessions
from lbproxy.core.capacity.opaque import BodySizes, OpaqueTimes
from lbproxy.core.capacity.others import MeanOthers
from lbproxy.core.knowledge.gaps import PoolGaps
from lbproxy.core.knowledge.learning import MediaScale, Samples, saved_samples
from lbproxy.core.knowledge.prefill_work import work_tokens
from lbproxy.core.knowledge.transfer import Transfer
from lbproxy.core.requests.media import FILLER_BYTES
from lbproxy.core.requests.outline import UNCUT_STRING_BYTES
from lbproxy.core.requests.request import InferenceRequest, Usage

BASE_MS: Final = 40.0
"""Assumed until it was learned: see `PoolModel.base_ms`."""


@mypyc_attr(allow_interpreted_subclasses=True)  # the simulation has one
class PoolModel:
    """What the endpoints have in common, and the models of all of them."""

    def __init__(self, block_bytes: int, index_entries: int = MAX_ENTRIES) -> None:
        self.index = PrefixIndex(block_bytes, index_entries)
        self.adapters: Set[str] = frozenset()
        """The models that are LoRA adapters. `core.endpoints.serving` owns and updates the set."""
        self.token_ms = 0.1
        """Prefill time per uncached token."""
        self.output_tokens = 200.0
        """Mean length of a response."""
        self.hit_ratio = 0.3
        """The share of prompt tokens that was predicted to be cached."""
        self.bytes_per_token = 4.0
        """Bytes of a flattened prompt that make one token."""
        self.work_tokens = 500.0
        """Mean prefill work of a request."""
        self.load_times = LoadTimes()
        """Of adapters."""
        self.base_ms = BASE_MS
        """Time to the first token that does not depend on the prompt, of endpoints that served recently."""
        self.transfer = Transfer(self.token_ms)
        """Of prompts' KV caches from one endpoint to another."""
        self.gaps = PoolGaps(15.0, 1e-4)
        self.gap_ms, self.gap_per_token_ms = self.gaps.gap_ms, self.gaps.gap_per_token_ms
        """The inter-token gap of all endpoints together: assumed for endpoints without samples."""
        self.size = SizeEstimate()
        """The estimated size of KV caches of unknown size, as if all were alike: it prices their space. Space must not
        cost less at an endpoint of which more is known."""
        self.opaque, self.body_sizes = OpaqueTimes(), BodySizes()
        """How long opaque requests take, and how that depends on their size."""
        self.savings = Savings()
        """Whether prefix caches save time."""
        self.sessions = Sessions()
        """Where the sessions that clients name were placed."""
        self.media = MediaScale()
        self.others = MeanOthers()
        """The mean load of other clients, over the endpoints that report it."""
        self.samples = Samples()
        self._seen_bytes, self._seen_tokens = 8000.0, 2000.0

    def prompt_tokens(self, request: InferenceRequest) -> float:
        """The tokens of a request's prompt; at least 1."""
        if request.media_tokens:
            text_bytes = request.prompt_bytes - FILLER_BYTES * request.media_tokens
            return max(1.0, text_bytes / self.bytes_per_token + self.media.scale * request.media_tokens)
        tokens = request.prompt_bytes / self.bytes_per_token
        return tokens if tokens > 1.0 else 1.0

    def block_tokens(self, request: InferenceRequest) -> float:
        """The mean number of tokens in one of its blocks."""
        if request.media_tokens:
            return self.prompt_tokens(request) * self.index.block_bytes / request.prompt_bytes
        return self.index.block_bytes / self.bytes_per_token

    def least_work(self, request: InferenceRequest) -> float:
        """The least prefill work, in tokens, that the request is at any endpoint."""
        cached = self.index.longest(request.block_keys) * self.block_tokens(request)
        return work_tokens(max(1.0, self.prompt_tokens(request) - cached), cached)

    def learn_usage(self, request: InferenceRequest, usage: Usage) -> None:
        """Learn from reported usage how many bytes make a token, and how many tokens media have."""
        tokens = usage.prompt_tokens or 0
        self.savings.is_reported |= usage.cached_tokens is not None
        if request.media_tokens:
            estimated = request.media_tokens
            text_tokens = (request.prompt_bytes - FILLER_BYTES * estimated) / self.bytes_per_token
            self.media.learn(tokens - text_tokens, estimated)
        elif request.body_bytes <= UNCUT_STRING_BYTES and request.is_text(tokens):  # larger ones are cut
            self._seen_bytes = 0.98 * self._seen_bytes + request.prompt_bytes
            self._seen_tokens = 0.98 * self._seen_tokens + tokens
            self.bytes_per_token = self._seen_bytes / self._seen_tokens
            self.samples.bytes_per_token += 1

    def save(self) -> dict[str, dict[str, float]]:
        """What was learned of all endpoints together, for `restore`."""
        rates = {"token_ms": self.token_ms, "base_ms": self.base_ms, "output_tokens": self.output_tokens}
        text = {"seen_bytes": self._seen_bytes, "seen_tokens": self._seen_tokens, "media_scale": self.media.scale}
        cached = {"hit_ratio": self.hit_ratio, "work_tokens": self.work_tokens, "session_trust": self.sessions.trust}
        loads = {"load_again_ms": self.load_times.again, "load_first_ms": self.load_times.first}
        return {
            "pool": {**rates, **text, **cached, **loads},
            "gaps": self.gaps.save(),
            "size": self.size.save(),
            "samples": asdict(self.samples),
        }

    def restore(self, saved: Mapping[str, Mapping[str, float]], share: float) -> None:
        """Start with what `save` returned. `share`: of the weight of its samples; 1 = it is new."""
        pool = saved["pool"]
        self.token_ms, self.base_ms, self.output_tokens = pool["token_ms"], pool["base_ms"], pool["output_tokens"]
        self._seen_bytes, self._seen_tokens = pool["seen_bytes"], pool["seen_tokens"]
        self.bytes_per_token, self.media = self._seen_bytes / self._seen_tokens, MediaScale(pool["media_scale"])
        self.hit_ratio, self.work_tokens = pool["hit_ratio"], pool["work_tokens"]
        self.sessions.trust = pool["session_trust"]
        self.load_times = LoadTimes(pool["load_again_ms"], pool["load_first_ms"])
        self.gaps.restore(saved["gaps"], share)
        self.gap_ms, self.gap_per_token_ms = self.gaps.gap_ms, self.gaps.gap_per_token_ms
        self.size.restore(saved["size"])
        self.samples = saved_samples(saved["samples"])
