# SPDX-License-Identifier: Apache-2.0
"""What clients ask for, by model, in counts that only grow: rates are differences of two readings (`readings`).

Counted is what could be served: each request once as it arrives, also if it is refused for lack of room or waits, but
not what exceeds a flow's own limit. Names are those of models that endpoints list (`know`), never a client's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from lbproxy.core.knowledge.placement import Placement
from lbproxy.core.requests.request import PREFILL, InferenceRequest, Usage

MAX_MODELS: Final = 512
"""Models that are counted."""


class ModelDemand:
    """The counts of one model."""

    def __init__(self) -> None:
        self.arrived = 0
        """Requests."""
        self.arrived_bytes = 0
        """Bytes of the prompts that arrived."""
        self.placed = 0
        """Requests that were sent to an endpoint, or sent again."""
        self.placed_bytes = 0
        """Bytes of the prompts that were placed."""
        self.placed_work = 0.0
        """Prefill work, in tokens: what was not cached."""
        self.completed = 0
        """Responses of known length."""
        self.output_tokens = 0
        """Tokens of responses."""
        self.streamless_tokens = 0
        """Tokens of `output_tokens` that no stream showed before the end."""


class Demand:
    """The counts of all models."""

    def __init__(self) -> None:
        self.models: dict[str, ModelDemand] = {}
        """Models that endpoints list, or did."""

    def know(self, models: Iterable[str]) -> None:
        """Count these models from now on, at most `MAX_MODELS`."""
        for model in models:
            if model not in self.models and len(self.models) < MAX_MODELS:
                self.models[model] = ModelDemand()

    def arrived(self, request: InferenceRequest) -> None:
        """Count a request that could be served if there is room."""
        if request.model is not None:
            counts = self.models.get(request.model)
            if counts is not None:
                counts.arrived += 1
                counts.arrived_bytes += request.prompt_bytes

    def placed(self, placement: Placement) -> None:
        """Count a placement."""
        request = placement.request
        if request.model is not None:
            counts = self.models.get(request.model)
            if counts is not None:
                counts.placed += 1
                if request.prompt_bytes:
                    counts.placed_bytes += request.prompt_bytes
                    counts.placed_work += placement.work

    def ended(self, placement: Placement, usage: Usage | None) -> None:
        """Count the length of a complete response."""
        request = placement.request
        if usage is None or usage.completion_tokens is None or request.model is None or request.leg == PREFILL:
            return
        counts = self.models.get(request.model)
        if counts is not None:
            counts.completed += 1
            counts.output_tokens += usage.completion_tokens
            counts.streamless_tokens += max(0, usage.completion_tokens - placement.streamed_tokens)
