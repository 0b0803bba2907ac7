"""Which settings the chosen policy does not read: for `lbproxy check`, as nothing else would tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lbproxy.config.tree import Settings
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.policies.registry import make_policy


def ignored_settings(settings: Settings, endpoints: Iterable[EndpointSpec]) -> Iterator[tuple[str, str]]:
    """Keys that are written down and change nothing under the policy, each with the reason.

    `endpoints`: those that discovery found, which have weights of SRV records too. A key at its default is not
    reported, nor are weights that are all equal, as they say nothing under any policy.
    """
    policy = make_policy(settings.routing)
    weights = {one.weight for one in settings.endpoints} | {one.weight for one in endpoints}
    if len(weights) > 1 and not policy.reads_weights:
        yield "endpoints[].weight", "it does not compare endpoints by what they can take"
    if policy.block_bytes is None:  # the work of each request and the prefix caches are not followed
        if any(one.kv_cache_tokens is not None for one in settings.endpoints):
            yield "endpoints[].kv_cache_tokens", "it does not follow prefix caches"
        if "prefix_memory" in settings.routing.model_fields_set:
            yield "routing.prefix_memory", "it does not follow prefix caches"
        if settings.admission.order == "shortest" and "order" in settings.admission.model_fields_set:
            yield "admission.order", "it does not know how much work a request is, so they go in the order of arrival"
    if settings.admission.hold and not policy.holds:
        yield "admission.hold", "it does not predict waits"
