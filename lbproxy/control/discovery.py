"""Where the set of endpoints comes from. The only module of the control plane that may read files.

Every source yields complete sets: the Balancer compares them with what it has, so that a source that was restarted, or
that missed a change, is right again with its next set. The settings are the one source so far, and never change.
"""

from __future__ import annotations

from lbproxy.config import Settings
from lbproxy.core.types import EndpointSpec


def static_endpoints(settings: Settings) -> list[EndpointSpec]:
    """The endpoints that the settings name, in their order. Names and addresses are distinct."""
    return [
        EndpointSpec(name=one.name, base_url=one.url, engine=one.engine, metrics=one.metrics, health=one.health)
        for one in settings.endpoints
    ]
