"""Where the set of endpoints comes from. The only module of the control plane that may read files.

Every source yields complete sets: the Balancer compares them with what it has, so that a source that was restarted, or
that missed a change, is right again with its next set. The sources are the settings' own addresses, which never change,
and the names of their `dns+http://` entries, each resolved again and again by a loop of its own.

What to believe of an answer is `KnownName`'s, without I/O. The rules:

- An answer with addresses is the name's new set, at once: what it lacks drains, what it adds is probed first.
- A failure (time-out, SERVFAIL, refusal, garbage) changes nothing: a broken nameserver says nothing about servers.
- That there are no addresses (an empty answer, or NXDOMAIN) is acted on after three such answers in a row, and even
  then only against endpoints that their own health checks call down. A nameserver that lost its zone stops nobody.
- If one family's question fails, what was known of that family stays.
- Addresses where no model server can stand, or where lbproxy itself listens, are left out.
- The set is sorted and without duplicates, so that the order of an answer, which rotates, changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from lbproxy.config import MAX_ENDPOINTS, Address, ConfigError, EndpointSettings, Settings, leads_to
from lbproxy.control.prober import JITTER
from lbproxy.control.resolver import EMPTY, FAILED, NXDOMAIN, OK, Answer, IPAddress, Lookup, Resolver
from lbproxy.core.credentials import ApiKey, Tls
from lbproxy.core.types import EndpointSnapshot, EndpointSpec, Health
from lbproxy.net.tls import client_context
from lbproxy.runtime import Runtime

logger = logging.getLogger("lbproxy")

EMPTY_UNTIL_BELIEVED = 3
FIRST_RETRY_S = 1.0
"""Between resolutions at most until the first good one: what starts together with lbproxy may get its name later."""
MAX_HOSTS_CHARS = 4 << 20
HOSTS = Path("/etc/hosts")
MAX_LOGGED = 10
MAX_CERTIFICATES_CHARS = 4 << 20

Certificates: TypeAlias = Mapping[str, str]
"""The text of the files that `tls.ca` names, by their paths."""
NO_CERTIFICATES: Certificates = MappingProxyType({})
Publish: TypeAlias = Callable[[list[EndpointSpec]], None]
"""Gets each new complete set."""


def read_hosts() -> str:
    """The hosts file; empty if there is none."""
    with contextlib.suppress(OSError), HOSTS.open(encoding="utf-8", errors="replace") as file:
        return file.read(MAX_HOSTS_CHARS)
    return ""


def static_endpoints(settings: Settings, certificates: Certificates = NO_CERTIFICATES) -> list[EndpointSpec]:
    """The endpoints that the settings name by their address, in their order. Names and addresses are distinct."""
    return [_spec(one, one.name, one.authority, certificates) for one in settings.endpoints if not one.is_name]


def _spec(entry: EndpointSettings, name: str, authority: str, certificates: Certificates) -> EndpointSpec:
    return EndpointSpec(
        name=name,
        base_url=f"{entry.scheme}://{authority}",
        engine=entry.engine,
        metrics=entry.metrics,
        health=entry.health,
        models=entry.models,
        weight=entry.weight,
        api_key=None if entry.api_key is None else ApiKey(entry.api_key.get_secret_value()),
        tls=_tls(entry, certificates) if entry.scheme == "https" else None,
    )


def _tls(entry: EndpointSettings, certificates: Certificates) -> Tls:
    """The name of an address is the one that it was found by."""
    found_by = entry.authority.rpartition(":")[0].rstrip(".") if entry.is_name else None
    ca = None if entry.tls.ca is None else certificates[entry.tls.ca]
    return Tls(ca, entry.tls.verify, entry.tls.server_name or found_by)


def read_certificates(entries: Sequence[EndpointSettings], path: str = "endpoints") -> Certificates:
    """The files of certificates that endpoints' `tls.ca` name. Raises ConfigError; `path` is where the entries stand.

    Takes up to 20 ms for each different one: what needs them is made here, to know that they are good.
    """
    texts: dict[str, str] = {}
    wrong: dict[str, str] = {}
    problems = []
    for index, entry in enumerate(entries):
        if entry.scheme != "https":
            continue
        ca = entry.tls.ca
        if ca is not None and ca not in texts and ca not in wrong:
            try:
                texts[ca] = _read_certificates(ca)
            except ValueError as error:
                wrong[ca] = str(error)
        if ca in wrong:
            problems.append(f"{path}[{index}].tls.ca: expected a file of certificates, but {wrong[ca]}, got '{ca}'")
    if problems:
        raise ConfigError("settings", problems)
    return texts


def _read_certificates(path: str) -> str:
    """Raises ValueError with what is wrong."""
    try:
        with Path(path).open(encoding="ascii", errors="replace") as file:
            text = file.read(MAX_CERTIFICATES_CHARS + 1)
    except OSError as error:
        raise ValueError(f"it cannot be read: {os.strerror(error.errno or 0).lower()}") from None
    if len(text) > MAX_CERTIFICATES_CHARS:
        raise ValueError("it is larger than 4 MiB")
    try:
        client_context(text, True)
    except ValueError as error:
        raise ValueError(f"it holds {error}") from None
    return text


class KnownName:
    """What is believed of one `dns+http://` entry. Pure: `hear` is told each answer."""

    def __init__(self, entry: EndpointSettings, own: Sequence[Address] = ()) -> None:
        """`own`: where lbproxy listens."""
        self.entry = entry
        self.host, _, self._port = entry.authority.rpartition(":")
        self._own = [one for one in own if str(one.port) == self._port]  # others need no look for each address
        self._addresses: tuple[IPAddress, ...] = ()
        self.authorities: list[str] = []
        """The endpoints' `host:port`: distinct, IPv4 first, ascending, at most MAX_ENDPOINTS."""
        self._empties = 0
        """In a row."""
        self.results: dict[str, int] = {}
        """Resolutions by result: a word of `control.resolver`. `ok` if one family brought addresses."""
        self.found = 0
        """Addresses in the last answer that had some, those beyond MAX_ENDPOINTS too."""
        self.problem: str | None = None
        """Why the last resolution brought nothing; None if it brought addresses, and before the first."""

    def hear(self, lookup: Lookup, down: Callable[[], Collection[str]]) -> None:
        """One resolution's outcome. `down` says which `host:port` are down by their health checks."""
        heard = {address for answer in lookup for address in answer.usable}
        fresh = {one for one in heard if self._is_other(one)} if self._own else heard
        result = _result(lookup, bool(fresh))
        self.results[result] = self.results.get(result, 0) + 1
        self._empties = self._empties + 1 if result in {EMPTY, NXDOMAIN} else 0
        if result == OK:
            unheard = {version for version, answer in ((4, lookup.v4), (6, lookup.v6)) if not _was_heard(answer)}
            kept = {one for one in self._addresses if one.version in unheard}
            ordered = sorted(fresh | kept, key=lambda one: (one.version, int(one)))
            self.found = len(ordered)
            self._adopt(tuple(ordered[:MAX_ENDPOINTS]))
            self.problem = None
            return
        if self._empties >= EMPTY_UNTIL_BELIEVED:
            gone = down()
            self._adopt(tuple(one for one in self._addresses if self._authority(one) not in gone))
        self.problem = _reason(lookup)

    def _adopt(self, addresses: tuple[IPAddress, ...]) -> None:
        if addresses != self._addresses:
            self._addresses = addresses
            self.authorities = [self._authority(address) for address in addresses]

    def _authority(self, address: IPAddress) -> str:
        return f"[{address}]:{self._port}" if address.version == 6 else f"{address}:{self._port}"

    def _is_other(self, address: IPAddress) -> bool:
        return not any(leads_to(self._authority(address), own) for own in self._own)


def _was_heard(answer: Answer) -> bool:
    return answer.result in {OK, EMPTY, NXDOMAIN}


def _result(lookup: Lookup, any_usable: bool) -> str:
    """The two answers in one word."""
    if any_usable:
        return OK
    failed = [answer.result for answer in lookup if not _was_heard(answer)]
    if failed:
        return failed[0]
    if any(answer.result == OK for answer in lookup):
        return FAILED  # it has addresses, none of which is usable
    return NXDOMAIN if all(answer.result == NXDOMAIN for answer in lookup) else EMPTY


def _reason(lookup: Lookup) -> str:
    """Of the answer that went worse."""
    worse = min(lookup, key=lambda answer: (_was_heard(answer), answer.result != OK))
    if worse.result == OK:
        return f"none of its addresses can be used: {', '.join(worse.addresses[:MAX_LOGGED])}"
    return worse.detail


class Discovery:
    """The settings' endpoints as complete sets. `close` it last."""

    def __init__(
        self,
        settings: Settings,
        rng: random.Random,
        resolver: Resolver | None = None,
        known: Sequence[KnownName] = (),
        certificates: Certificates | None = None,
    ) -> None:
        """`known`: names that something is known of already. `certificates`: read already.

        Raises ConfigError if certificates cannot be read.
        """
        self._certificates = read_certificates(settings.endpoints) if certificates is None else certificates
        self._settings = settings
        self._rng = rng
        self._resolver = resolver or Resolver(settings.dns, read_hosts)
        own = [one for one in (settings.listen, settings.admin) if one is not None]
        by_entry = {one.entry: one for one in known}
        entries = [entry for entry in settings.endpoints if entry.is_name]
        self.names = [by_entry.get(entry) or KnownName(entry, own) for entry in entries]

    async def under(self, settings: Settings) -> Discovery:
        """The same under other settings. Names that stay are known as before, others are resolved once: a set without
        their addresses would empty a pool that only changed how it is written down. Raises ConfigError if certificates
        cannot be read.
        """
        resolver = self._resolver if settings.dns == self._settings.dns else None
        certificates = await asyncio.to_thread(read_certificates, settings.endpoints)
        successor = Discovery(settings, self._rng, resolver, self.names, certificates)
        await asyncio.gather(*(successor._resolve(name, tuple) for name in successor.names if not name.results))
        return successor

    def replaced_by(self, successor: Discovery) -> None:
        """It takes over: `close` what it does not use."""
        if successor._resolver is not self._resolver:
            self.close()

    def close(self) -> None:
        """End what still resolves."""
        self._resolver.close()

    def endpoints(self) -> list[EndpointSpec]:
        """The complete set as far as known: the settings' addresses, then those of its names, each in their order.

        Names and addresses are distinct: of two entries that lead to one address the first counts, and an address that
        the settings name themselves before all. At most MAX_ENDPOINTS.
        """
        specs = {spec.base_url: spec for spec in static_endpoints(self._settings, self._certificates)}
        taken = {spec.name for spec in specs.values()}
        for known in self.names:
            for authority in known.authorities:
                spec = _spec(known.entry, _name(known.entry, authority, taken), authority, self._certificates)
                if spec.base_url not in specs and len(specs) < MAX_ENDPOINTS:
                    specs[spec.base_url] = spec
                    taken.add(spec.name)
        return list(specs.values())

    async def resolve_once(self) -> None:
        """Resolve every name, all at the same time."""
        await asyncio.gather(*(self._resolve(name, tuple) for name in self.names))

    def loops(self, runtime: Runtime, publish: Publish) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """One loop for each name, and what to call it, for `runtime.supervise`."""
        for name in self.names:
            yield f"discovery of {name.entry.name}", partial(self._follow, name, runtime, publish)

    async def _follow(self, name: KnownName, runtime: Runtime, publish: Publish) -> None:
        """Until cancelled."""
        while True:
            began_at = runtime.now()
            before, was_good = name.authorities, name.problem is None
            await self._resolve(name, lambda: _down(runtime.snapshot().endpoints))
            if was_good != (name.problem is None):
                _log_problem(name)
            if name.authorities != before:
                await asyncio.sleep(0)  # both take about 10 ms for 1,000 addresses: requests may go between
                _log_change(name, before)
                publish(self.endpoints())
            interval_s = self._settings.dns.interval
            if OK not in name.results:
                interval_s = min(interval_s, FIRST_RETRY_S)
            due_at = began_at + interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
            await asyncio.sleep(max(0.0, due_at - runtime.now()))

    async def _resolve(self, name: KnownName, down: Callable[[], Collection[str]]) -> None:
        name.hear(await self._resolver.lookup(name.host), down)


def _name(entry: EndpointSettings, authority: str, taken: Collection[str]) -> str:
    """What the endpoint at one address of a name is called."""
    if entry.name == entry.authority and authority not in taken:  # no name of its own
        return authority
    return f"{entry.name}/{authority}"  # no entry's name has a slash, and no two entries have one name


def _down(endpoints: Sequence[EndpointSnapshot]) -> set[str]:
    """The `host:port` of members that are down. One that is leaving may have a successor there, which stands before."""
    health: dict[str, Health] = {}
    for one in endpoints:
        health.setdefault(one.endpoint.authority, one.health)
    return {authority for authority, verdict in health.items() if verdict is Health.DOWN}


def _log_change(name: KnownName, before: list[str]) -> None:
    now = name.authorities
    known, wanted = set(before), set(now)
    added, removed = [one for one in now if one not in known], [one for one in before if one not in wanted]
    extra = {"event": "discovery", "source": name.entry.name, "endpoints": len(now)}
    extra |= {"added": added[:MAX_LOGGED], "removed": removed[:MAX_LOGGED]}
    text = "%s has %d addresses%s: added %s; removed %s"
    cut = f" (of {name.found})" if name.found > len(now) else ""
    logger.info(text, name.entry.name, len(now), cut, _some(added), _some(removed), extra=extra)


def _log_problem(name: KnownName) -> None:
    extra: dict[str, object] = {"event": "discovery", "source": name.entry.name, "endpoints": len(name.authorities)}
    if name.problem is None:
        logger.info("%s can be resolved again", name.entry.name, extra=extra)
        return
    text = "%s cannot be resolved, so what is known of it stays (%d addresses): %s"
    extra["reason"] = name.problem
    logger.warning(text, name.entry.name, len(name.authorities), name.problem, extra=extra)


def _some(authorities: list[str]) -> str:
    more = f" and {len(authorities) - MAX_LOGGED} more" if len(authorities) > MAX_LOGGED else ""
    return (", ".join(authorities[:MAX_LOGGED]) or "none") + more
