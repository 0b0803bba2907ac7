# SPDX-License-Identifier: Apache-2.0
"""Settings that the configured policy does not read: reported by `lbproxy check`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.tree import Settings
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.policies.registry import make_policy


def ignored_settings(settings: Settings, endpoints: Iterable[EndpointSpec]) -> Iterator[tuple[str, str]]:
    """Yield configured keys that have no effect under the policy, each with the reason.

    `endpoints`: those that discovery found, which may have weights from SRV records. A key at its default is not
    reported, nor are weights that are all equal, as they have no effect under any policy.
    """
    policy = make_policy(settings.routing)
    weights = {one.weight for one in settings.endpoints} | {one.weight for one in endpoints}
    if len(weights) > 1 and not policy.reads_weights:
        yield "endpoints[].weight", "it does not compare endpoints by what they can take"
    if policy.block_bytes is None:  # it does not follow the work of requests and the prefix caches
        if any(one.kv_cache_tokens is not None for one in settings.endpoints):
            yield "endpoints[].kv_cache_tokens", "it does not follow prefix caches"
        if "prefix_memory" in settings.routing.model_fields_set:
            yield "routing.prefix_memory", "it does not follow prefix caches"
        if settings.state.file is not None and not any(_is_kept(one) for one in settings.endpoints):
            yield "state.file", "it learns nothing"
        if settings.admission.order == "shortest" and "order" in settings.admission.model_fields_set:
            yield "admission.order", "it does not know how much work a request is, so they go in the order of arrival"
    if settings.admission.hold and not policy.holds:
        yield "admission.hold", "it does not predict waits"


def _is_kept(endpoint: EndpointSettings) -> bool:
    """Whether `state.file` has something of an endpoint under any policy."""
    limits = endpoint.requests_per_minute, endpoint.tokens_per_minute, endpoint.tokens_per_day
    return endpoint.wake or endpoint.cold_start is not None or any(limit is not None for limit in limits)
