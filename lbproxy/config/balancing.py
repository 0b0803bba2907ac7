# SPDX-License-Identifier: Apache-2.0
"""The sections of the settings that the Balancer reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from lbproxy.config.sections.endpoints import ScrapeSettings
from lbproxy.config.sections.flows import FlowsSettings
from lbproxy.config.sections.health import BreakerSettings, HealthSettings
from lbproxy.config.sections.observing import AutoscalingSettings
from lbproxy.config.sections.routing import AdmissionSettings, OverflowSettings, RetrySettings
from lbproxy.config.sleep import HostSettings


class BalancingSettings(NamedTuple):
    """One field for each section, with its defaults; `Settings.balancing` makes it."""

    admission: AdmissionSettings = AdmissionSettings()
    flows: FlowsSettings = FlowsSettings()
    retry: RetrySettings = RetrySettings()
    health: HealthSettings = HealthSettings()
    breaker: BreakerSettings = BreakerSettings()
    scrape: ScrapeSettings = ScrapeSettings()
    overflow: OverflowSettings = OverflowSettings()
    hosts: Mapping[str, HostSettings] = MappingProxyType({})
    autoscaling: AutoscalingSettings = AutoscalingSettings()
