# SPDX-License-Identifier: Apache-2.0
"""Makes what the balancer gets, an `EndpointSpec`, of an entry of the settings or of a file. Pure.

An entry that is a name leads to up to a thousand endpoints: what these have in common is read once (`MemberSpecs`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.sections.engines import LBPROXY
from lbproxy.config.sections.proxies import ProxyUrl
from lbproxy.control.discovery.known_names import NameMember
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy, Tls
from lbproxy.core.endpoints.endpoint import ColdStart, EndpointSpec, SleepSpec
from lbproxy.core.engines.handover import Role

Certificates: TypeAlias = Mapping[str, str]
"""The text of the files that `tls.ca` names, by their paths."""
NO_CERTIFICATES: Certificates = MappingProxyType({})


def spec_of(entry: EndpointSettings, name: str, certificates: Certificates) -> EndpointSpec:
    """Of an entry that is an address itself."""
    tls = _tls(entry, None, certificates) if entry.scheme == "https" else None
    return _common(entry)(name=name, base_url=entry.base_url, weight=entry.weight, tls=tls)


class MemberSpecs:
    """Makes the specs of the members of one entry that is a name."""

    def __init__(self, entry: EndpointSettings, certificates: Certificates) -> None:
        self._entry = entry
        self._certificates = certificates
        self._make = _common(entry)
        self._scheme = entry.scheme
        self._weight = entry.weight
        self._has_own_name = entry.name != entry.authority

    def __call__(self, member: NameMember, taken: Collection[str]) -> EndpointSpec:
        """Of one member. `taken`: names of endpoints that it must not have. About 2 µs."""
        authority = member.authority
        # No entry's name has a slash, and no two entries have one name.
        is_taken = self._has_own_name or authority in taken
        return self._make(
            name=f"{self._entry.name}/{authority}" if is_taken else authority,
            base_url=f"{self._scheme}://{authority}",
            weight=self._weight * member.weight,
            tls=_tls(self._entry, member, self._certificates) if self._scheme == "https" else None,
        )


def _common(entry: EndpointSettings) -> Callable[..., EndpointSpec]:
    """What all specs of an entry have in common."""
    return partial(
        EndpointSpec,
        engine=entry.engine,
        metrics=None if entry.engine == LBPROXY and "metrics" not in entry.model_fields_set else entry.metrics,
        health=entry.health,
        models=entry.models,
        model=entry.model,
        tier=entry.tier,
        forward_headers=entry.forward_headers,
        bounds=_bounds(entry),
        kv_cache_tokens=entry.kv_cache_tokens,
        ranks=entry.ranks or None,
        role=None if entry.role == "auto" else Role(entry.role),
        connector=None if entry.connector == "auto" else entry.connector,
        bootstrap_port=entry.bootstrap_port,
        kv_events=entry.kv_events,
        kv_events_replay=entry.kv_events_replay,
        sleep=_sleep(entry),
        api_key=None if entry.api_key is None else ApiKey(entry.api_key.get_secret_value()),
        proxy=None if entry.proxy is None else _proxy(entry.proxy),
    )


def _sleep(entry: EndpointSettings) -> SleepSpec | None:
    hook = entry.cold_start
    token = None if hook is None or hook.token is None else ApiKey(hook.token.get_secret_value())
    if not entry.wake and hook is None:
        return None
    cold_start = None if hook is None else ColdStart(hook.url, hook.timeout, token)
    return SleepSpec(entry.wake, entry.sleep_after, entry.sleep_level, entry.host, cold_start)


def _bounds(entry: EndpointSettings) -> Bounds | None:
    bounds = Bounds(entry.max_in_flight, entry.requests_per_minute, entry.tokens_per_minute, entry.tokens_per_day)
    return None if bounds == Bounds() else bounds


def _proxy(url: ProxyUrl) -> ForwardProxy:
    if url.userinfo is None:
        return ForwardProxy(url.host, url.port)
    return ForwardProxy(url.host, url.port, ApiKey(f"Basic {base64.b64encode(url.userinfo.encode()).decode()}"))


def _tls(entry: EndpointSettings, member: NameMember | None, certificates: Certificates) -> Tls:
    ca = None if entry.tls.ca is None else certificates[entry.tls.ca]
    return Tls(ca, entry.tls.verify, entry.tls.server_name or (member and member.found_by.rstrip(".")))
