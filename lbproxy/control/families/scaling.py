# SPDX-License-Identifier: Apache-2.0
"""What /metrics shows for autoscalers, by model: see `core.scaling.advice`. Adapters count for the endpoints of their
base model, and have no series. At most `MAX_MODELS` models have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import Metric

from lbproxy.control.families.common import gauges
from lbproxy.core.scaling.advice import ModelScaling

MAX_MODELS: Final = 100
MAX_LABEL_CHARS: Final = 128


def scaling_families(models: Sequence[ModelScaling]) -> Iterator[Metric]:
    """No sample, while no endpoint has listed its models."""
    by_label = {one.model[:MAX_LABEL_CHARS]: one for one in models[:MAX_MODELS]}
    rows = [((label,), one) for label, one in by_label.items()]
    text = "Endpoints that the model's load needs, by learned speeds; unknown: those that there are"
    yield gauges("recommended_endpoints", text, ("model",), [(labels, one.recommended) for labels, one in rows])
    text = "Endpoints of the model that take requests now"
    yield gauges("model_endpoints", text, ("model",), [(labels, one.endpoints) for labels, one in rows])
    text = "Requests for the model in the queue of lbproxy"
    yield gauges("model_waiting_requests", text, ("model",), [(labels, one.waiting) for labels, one in rows])
    text = "Predicted wait of a request for the model that arrives now, until its prefill"
    yield gauges("model_predicted_wait_seconds", text, ("model",), [(ls, one.predicted_wait_s) for ls, one in rows])
    text = "Share of the capacity of the model's endpoints that is left"
    yield gauges("model_room_ratio", text, ("model",), [(labels, one.room) for labels, one in rows])
