# SPDX-License-Identifier: Apache-2.0
"""What is believed of names, told each answer about them. Pure.

- An answer with addresses is the name's new set, at once: what it lacks drains, what it adds is probed first.
- A failure (time-out, SERVFAIL, refusal, garbage) changes nothing: a broken nameserver says nothing about servers.
- That there are no addresses (an empty answer, or NXDOMAIN) is acted on after three such answers in a row, and even
  then only against endpoints that their own health checks call down. A nameserver that lost its zone stops nobody.
- If one family's question fails, what was known of that family stays.
- Addresses where no model server can stand, or where lbproxy itself listens, are left out.
- The set is sorted and without duplicates, so that the order of an answer, which rotates, changes nothing.
- Of SRV records the lowest priority counts that has an address; while all of its addresses are down by their health
  checks, the next one is there besides. The same rules hold for the records as for addresses, and for each target.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from lbproxy.config.sections.clients import Address, leads_to
from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.tree import MAX_ENDPOINTS
from lbproxy.control.discovery.dns_answers import (
    EMPTY,
    FAILED,
    NXDOMAIN,
    OK,
    DnsAnswer,
    IPAddress,
    Lookup,
    Services,
    SrvRecord,
)

EMPTY_UNTIL_BELIEVED = 3
MAX_TARGETS = 256
"""Distinct names that one SRV name may lead to."""
MAX_LOGGED = 10


class NameMember(NamedTuple):
    """An endpoint that a name leads to."""

    authority: str
    """`host:port`."""
    weight: float
    """As DNS says, beside the entry's own."""
    found_by: str
    """The name whose address this is: its certificate must have it."""


class KnownName:
    """What is believed of one name's addresses. Pure: `hear` is told each answer."""

    def __init__(self, entry: EndpointSettings, own: Sequence[Address] = (), authority: str | None = None) -> None:
        """`own`: where lbproxy listens. `authority`: the name and port, if they are not the entry's."""
        self.entry = entry
        self.host, _, self._port = (authority or entry.authority).rpartition(":")
        self._own = [one for one in own if str(one.port) == self._port]  # others need no look for each address
        self._addresses: tuple[IPAddress, ...] = ()
        self.authorities: list[str] = []
        """The endpoints' `host:port`: distinct, IPv4 first, ascending, at most MAX_ENDPOINTS. Replaced, not changed."""
        self.members: list[NameMember] = []
        """The endpoints that it leads to, in this order. Replaced, not changed."""
        self._empties = 0
        """Answers in a row that had no usable address."""
        self.results: dict[str, int] = {}
        """Resolutions by result: a word of `control.discovery.resolver`. `ok` if one family brought addresses."""
        self.found = 0
        """Addresses in the last answer that had some, those beyond MAX_ENDPOINTS too."""
        self.problem: str | None = None
        """Why the last resolution brought nothing; None if it brought addresses, and before the first."""

    def inherit(self, other: KnownName) -> None:
        """Believe what was believed under other settings of this name, whatever else its entry said."""
        self.found = other.found
        self._adopt(tuple(one for one in other._addresses if self._is_other(one)))

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
            ordered = sorted(fresh | kept)
            self.found = len(ordered)
            self._adopt(tuple(ordered[:MAX_ENDPOINTS]))
            self.problem = None
            return
        if self._empties >= EMPTY_UNTIL_BELIEVED:
            self.drop(down())
        self.problem = _reason(lookup)

    def drop(self, authorities: Collection[str]) -> None:
        """Do not believe in these any more."""
        self._adopt(tuple(one for one in self._addresses if self._authority(one) not in authorities))

    def _adopt(self, addresses: tuple[IPAddress, ...]) -> None:
        if addresses != self._addresses:
            self._addresses = addresses
            self.authorities = [self._authority(address) for address in addresses]
            self.members = [NameMember(authority, 1.0, self.host) for authority in self.authorities]

    def _authority(self, address: IPAddress) -> str:
        return f"[{address.text}]:{self._port}" if address.version == 6 else f"{address.text}:{self._port}"

    def _is_other(self, address: IPAddress) -> bool:
        return not any(leads_to(self._authority(address), own) for own in self._own)


def _was_heard(answer: DnsAnswer) -> bool:
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


class KnownService:
    """What is believed of one `srv+http://` entry. Pure: `hear` is told each answer."""

    def __init__(self, entry: EndpointSettings, own: Sequence[Address] = ()) -> None:
        """`own`: where lbproxy listens."""
        self.entry = entry
        self.host = entry.authority
        self._own = own
        self._servers: tuple[SrvRecord, ...] = ()
        self._names: dict[tuple[str, int], KnownName] = {}
        """What is believed of each target, by it and its port."""
        self._empties = 0
        """Answers in a row that had no usable address."""
        self.members: list[NameMember] = []
        """The endpoints: distinct, by priority, target, port and address; at most MAX_ENDPOINTS."""
        self.results: dict[str, int] = {}
        """See KnownName."""
        self.found = 0
        """Members in the last answer that had some, those beyond MAX_ENDPOINTS too."""
        self.problem: str | None = None
        """See KnownName."""

    def inherit(self, other: KnownService) -> None:
        """Believe what was believed under other settings of this name, whatever else its entry said."""
        self._servers = tuple(self._allowed(other._servers))
        self._names = {key: self._name(*key) for key in dict.fromkeys((one.target, one.port) for one in self._servers)}
        for key, name in self._names.items():
            name.inherit(other._names[key])
        self._arrange(tuple)

    @property
    def authorities(self) -> list[str]:
        """The endpoints' `host:port`."""
        return [one.authority for one in self.members]

    def targets(self, services: Services) -> list[str]:
        """The names whose addresses are to be asked for now: an answer's, or those known where there is none."""
        servers = self._allowed(services.servers) if services.result == OK else self._servers
        if services.result in {EMPTY, NXDOMAIN}:
            return []
        return list(dict.fromkeys(one.target for one in servers))[:MAX_TARGETS]

    def hear(self, services: Services, lookups: Mapping[str, Lookup], down: Callable[[], Collection[str]]) -> None:
        """One resolution's outcome: the records, and the addresses of `targets`. `down`: see KnownName."""
        if allowed := self._allowed(services.servers):
            self._servers = tuple(one for one in allowed if one.target in lookups)
            keys = dict.fromkeys((one.target, one.port) for one in self._servers)
            self._names = {key: self._names.get(key) or self._name(*key) for key in keys}
        for (target, _), name in self._names.items():
            if target in lookups:
                name.hear(lookups[target], down)
        self._empties = self._empties + 1 if services.result in {EMPTY, NXDOMAIN} else 0
        if self._empties >= EMPTY_UNTIL_BELIEVED:
            for name in self._names.values():
                name.drop(down())
        self._arrange(down)
        self._judge(services, bool(allowed))

    def _judge(self, services: Services, any_allowed: bool) -> None:
        result, self.problem = services.result, services.detail or None
        if result == OK and not any_allowed:
            result = FAILED
            self.problem = f"none of its records' targets is in {self._domain}, and tls.server_name is not set"
        elif result == OK:
            good = [name for name in self._names.values() if name.problem is None]
            if not good:
                worst = next(iter(self._names.values()))
                result, self.problem = next(reversed(worst.results)), f"{worst.host}: {worst.problem}"
        self.results[result] = self.results.get(result, 0) + 1

    def _allowed(self, servers: Sequence[SrvRecord]) -> Sequence[SrvRecord]:
        """Whoever forges DNS answers may also have a certificate of a name of theirs: with TLS, targets are believed in
        the service's own domain only, unless the settings say which name the certificates must have.
        """
        if self.entry.scheme == "http" or self.entry.tls.server_name is not None:
            return servers
        return [one for one in servers if f".{one.target}".endswith(f".{self._domain}")]

    @property
    def _domain(self) -> str:
        """Of `_vllm._tcp.example` it is `example`."""
        labels = self.host.rstrip(".").split(".")
        while len(labels) > 1 and labels[0].startswith("_"):
            del labels[0]
        return ".".join(labels)

    def _name(self, target: str, port: int) -> KnownName:
        return KnownName(self.entry, self._own, f"{target}:{port}")

    def _arrange(self, down: Callable[[], Collection[str]]) -> None:
        """Which members the priorities leave."""
        members: dict[str, NameMember] = {}
        gone: Collection[str] | None = None
        for _, servers in groupby(self._servers, key=lambda one: one.priority):
            group = [member for server in servers for member in self._members(server)]
            for member in group:
                members.setdefault(member.authority, member)
            if group:
                gone = down() if gone is None else gone
                if any(member.authority not in gone for member in group):
                    break
        self.found = len(members)
        self.members = list(members.values())[:MAX_ENDPOINTS]

    def _members(self, server: SrvRecord) -> list[NameMember]:
        name = self._names.get((server.target, server.port))
        weight = float(max(1, server.weight))
        return [NameMember(authority, weight, server.target) for authority in (name.authorities if name else ())]


Known: TypeAlias = KnownName | KnownService


def known_of(entry: EndpointSettings, own: Sequence[Address], before: Iterable[Known] = ()) -> Known:
    """Of an entry that is a name. `before`: what is known of names, of which those of the same host say something."""
    if entry.is_srv:
        service = KnownService(entry, own)
        for one in before:
            if isinstance(one, KnownService) and one.host == service.host:
                service.inherit(one)
        return service
    name = KnownName(entry, own)
    for one in before:
        if isinstance(one, KnownName) and one.host == name.host:
            name.inherit(one)
    return name
