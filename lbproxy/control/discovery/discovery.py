# SPDX-License-Identifier: Apache-2.0
"""Where the set of endpoints comes from. The only module of the control plane that may read files of settings.

Every source yields complete sets: the Balancer compares them with what it has, so that a source that was restarted, or
that missed a change, is right again with its next set. The sources are the settings' own addresses, which never change;
the names of `dns+` and `srv+` entries, each resolved again and again by a loop of its own; and the files of `file:`
entries, each looked at by a loop of its own, in which there may be addresses and names again.

What to believe of DNS is `control.discovery.known_names`'s. Of a file:

- One that cannot be read, or holds anything but a good list of endpoints, changes nothing. It is told once.
- A new one is taken when it stayed the same from one look to the next: whoever writes in place is then done.
- An empty list is acted on only against endpoints that are down by their health checks, as with DNS.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from lbproxy.config.parse import parse_endpoints
from lbproxy.config.sections.clients import Address
from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.sections.engines import LBPROXY, LM_STUDIO, OLLAMA
from lbproxy.config.sections.proxies import ProxyUrl
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import MAX_ENDPOINTS, Settings
from lbproxy.control.discovery.dns_answers import OK, Lookup
from lbproxy.control.discovery.known_names import MAX_LOGGED, Known, KnownName, NameMember, known_of
from lbproxy.control.discovery.resolver import Resolver
from lbproxy.control.loops import supervise
from lbproxy.control.probing.prober import JITTER
from lbproxy.core.capacity.allowance import Bounds
from lbproxy.core.endpoints.credentials import ApiKey, ForwardProxy, Tls
from lbproxy.core.endpoints.endpoint import ColdStart, EndpointSpec, LoadSpec, SleepSpec
from lbproxy.core.endpoints.health import Health
from lbproxy.core.endpoints.state import EndpointSnapshot
from lbproxy.core.engines.handover import Role
from lbproxy.driver.runtime import Runtime
from lbproxy.net.dialing.tls import client_context

Certificates: TypeAlias = Mapping[str, str]
"""The text of the files that `tls.ca` names, by their paths."""
NO_CERTIFICATES: Certificates = MappingProxyType({})
FIRST_RETRY_S = 1.0
"""Between resolutions at most until the first good one: what starts together with lbproxy may get its name later."""
TARGETS_AT_ONCE = 16
"""Targets of an SRV name whose addresses are asked for at the same time."""
LOOK_S = 0.5
"""A file of endpoints is looked at so often. A look is one stat, in a thread."""
MAX_FILE_BYTES = 1 << 20
MAX_HOSTS_CHARS = 4 << 20
HOSTS = Path("/etc/hosts")
MAX_CERTIFICATES_CHARS = 4 << 20


def spec_of(entry: EndpointSettings, name: str, certificates: Certificates) -> EndpointSpec:
    """Of an entry that is an address itself."""
    tls = _tls(entry, None, certificates) if entry.scheme == "https" else None
    return _common(entry)(name=name, base_url=entry.base_url, weight=entry.weight, tls=tls)


class MemberSpecs:
    """Makes the specs of the members of one entry that is a name: up to a thousand endpoints, so that what they have in
    common is read once.
    """

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
    silent = entry.engine in {LBPROXY, OLLAMA, LM_STUDIO} and "metrics" not in entry.model_fields_set
    return partial(
        EndpointSpec,
        **{name: getattr(entry, name) for name in _SAME},
        metrics=None if silent else entry.metrics,
        bounds=_bounds(entry),
        ranks=entry.ranks or None,
        role=None if entry.role == "auto" else Role(entry.role),
        connector=None if entry.connector == "auto" else entry.connector,
        sleep=_sleep(entry),
        loading=_loading(entry),
        api_key=None if entry.api_key is None else ApiKey(entry.api_key.get_secret_value()),
        proxy=None if entry.proxy is None else _proxy(entry.proxy),
    )


_SAME = (
    *("engine", "health", "models", "model", "tier", "forward_headers", "client_keep_alive", "kv_cache_tokens"),
    *("bootstrap_port", "kv_events", "kv_events_replay"),
)
"""What a spec has as its entry says it."""


def _loading(entry: EndpointSettings) -> LoadSpec:
    keep, never = frozenset(entry.keep_loaded), frozenset(entry.never_load)
    sizes = tuple(entry.model_memory.items())
    most = entry.max_loaded_models if entry.memory is None else entry.memory if sizes else 1
    return LoadSpec(most, keep, never, sizes)


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


logger = logging.getLogger("lbproxy")


Publish: TypeAlias = Callable[[Callable[[], list[EndpointSpec]]], None]
"""Gets what makes the complete set, whenever that is another one."""


def read_hosts() -> str:
    """The hosts file; empty if there is none."""
    with contextlib.suppress(OSError), HOSTS.open(encoding="utf-8", errors="replace") as file:
        return file.read(MAX_HOSTS_CHARS)
    return ""


def read_certificates(
    entries: Sequence[EndpointSettings], path: str = "endpoints", source: str = "settings"
) -> Certificates:
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
        raise ConfigError(source, problems)
    return texts


def _read_certificates(path: str) -> str:
    """Raises ValueError with what is wrong."""
    try:
        with Path(path).open(encoding="ascii", errors="replace") as file:
            text = file.read(MAX_CERTIFICATES_CHARS + 1)
    except OSError as error:
        raise ValueError(_unreadable(error)) from None
    if len(text) > MAX_CERTIFICATES_CHARS:
        raise ValueError("it is larger than 4 MiB")
    try:
        client_context(text, True)
    except ValueError as error:
        raise ValueError(f"it holds {error}") from None
    return text


def _unreadable(error: OSError) -> str:
    return f"it cannot be read: {os.strerror(error.errno).lower() if error.errno else error}"


# --- Entries, and files of them ---------------------------------------------------------------------------------------


class Entries:
    """A list of entries, as the settings or a file have it: the addresses, and what is known of the names."""

    def __init__(
        self,
        entries: Sequence[EndpointSettings] = (),
        certificates: Certificates = NO_CERTIFICATES,
        own: Sequence[Address] = (),
        names: Iterable[Known] = (),
    ) -> None:
        """`own`: where lbproxy listens. `names`: such of which something is known already."""
        names = list(names)
        by_entry = {one.entry: one for one in names}
        self.entries = entries
        self.certificates = certificates
        self.addresses = [one for one in entries if not one.is_name and not one.is_file]
        self.names: list[Known] = [by_entry.get(one) or known_of(one, own, names) for one in entries if one.is_name]

    def __len__(self) -> int:
        return len(self.entries)

    def exchange(self, entries: Sequence[EndpointSettings]) -> bool:
        """Have other entries, of which those that stay are the same objects, and new ones stand last. False, and
        nothing is done, if names or files are among those that differ.
        """
        before, after = set(map(id, self.entries)), set(map(id, entries))
        gone = [one for one in self.entries if id(one) not in after]
        new = [one for one in entries if id(one) not in before]
        if any(one.is_name or one.is_file for one in (*gone, *new)):
            return False
        self.entries = entries
        self.addresses = [*(one for one in self.addresses if id(one) in after), *new]
        return True

    def up(self, down: Collection[str]) -> list[EndpointSettings]:
        """Those that are not known to be down."""
        gone = {one.entry for one in self.names if down and set(one.authorities) <= set(down)}
        gone.update(one for one in self.addresses if one.place in down)
        return [one for one in self.entries if one not in gone]


@dataclass
class EndpointFile:
    """What is known of one `file:` entry."""

    entry: EndpointSettings
    known: Entries = field(default_factory=Entries)
    """As of the last good one."""
    results: dict[str, int] = field(default_factory=dict)
    """Versions that were read, by result: `ok`, `invalid`, `unreadable`."""
    problem: str | None = None
    """What is wrong with it as it is now."""
    empty: bool = False
    """It is good, and lists nothing."""
    seen: tuple[int, ...] | None = None
    """What told the file that the last look saw from others; None: there was none."""
    read: tuple[int, ...] | None = None
    """What told the file that was read last from others."""

    def note(self, result: str, problem: str | None) -> None:
        """One version was read."""
        self.problem = problem
        self.results[result] = self.results.get(result, 0) + 1


def _look(path: str) -> tuple[int, ...] | None:
    """What tells the file from its other versions; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _read_endpoints(path: str, settings: Settings) -> tuple[Sequence[EndpointSettings], Certificates]:
    """The endpoints that a file lists, with the certificates that they name. Raises ConfigError, OSError."""
    with Path(path).open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(path, ["it is larger than 1 MiB"])
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(path, [f"not UTF-8: {error.reason} at byte {error.start}"]) from None
    folder = os.path.dirname(path)
    entries = parse_endpoints(text, environ=os.environ, source=path, folder=folder, settings=settings)
    return entries, read_certificates(entries, "", path)


class Discovery:
    """The settings' endpoints as complete sets. `close` it last."""

    def __init__(
        self,
        settings: Settings,
        rng: random.Random,
        resolver: Resolver | None = None,
        before: Discovery | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        """`before`: what it knows of names and files stays known. `certificates`: read already.

        Raises ConfigError if certificates cannot be read.
        """
        self._settings = settings
        self._rng = rng
        self._resolver = resolver or Resolver(settings.dns, read_hosts)
        self._own = [one for one in (settings.listen, settings.admin) if one is not None]
        if certificates is None:
            certificates = read_certificates(settings.endpoints)
        names = before._root.names if before is not None else []
        self._made: dict[str, tuple[EndpointSettings, EndpointSpec]] = {} if before is None else before._made
        """The last specs of entries that are addresses, by place."""
        self._root: Entries = Entries(settings.endpoints, certificates, self._own, names)
        files = {one.entry: one.known for one in before.files} if before is not None else {}
        self.files: list[EndpointFile] = [
            EndpointFile(one, files.get(one, Entries())) for one in settings.endpoints if one.is_file
        ]
        """Files of the settings, in their order."""

    async def under(self, settings: Settings) -> Discovery:
        """The same under other settings. What is known of names and files stays known, whatever else their entries say,
        and those that changed are asked once: a set without their addresses would empty a pool that only changed how it
        is written down. Raises ConfigError if certificates cannot be read.
        """
        resolver = self._resolver if settings.dns == self._settings.dns else None
        certificates = await asyncio.to_thread(read_certificates, settings.endpoints)
        successor = Discovery(settings, self._rng, resolver, self, certificates)
        for file in successor.files:
            await successor._read(file, tuple)
        await asyncio.gather(*(successor._resolve(name, tuple) for name in successor.names if not name.results))
        return successor

    def readdress(self, settings: Settings) -> bool:
        """Go on under settings that have other endpoints, and nothing else, which name no new certificate. False, and
        nothing is done, if names or files are among those that differ: see `under`.
        """
        if not self._root.exchange(settings.endpoints):
            return False
        self._settings = settings
        return True

    def replaced_by(self, successor: Discovery) -> None:
        """It takes over: `close` what it does not use."""
        if successor._resolver is not self._resolver:
            self.close()

    def close(self) -> None:
        """End what still resolves."""
        self._resolver.close()

    @property
    def names(self) -> list[Known]:
        """The names of the settings and of the files, as of now."""
        return [name for entries in self._all() for name in entries.names]

    def _all(self) -> list[Entries]:
        return [self._root, *(file.known for file in self.files)]

    def endpoints(self) -> list[EndpointSpec]:
        """The complete set as far as known: the settings' addresses, those of files, then those of names, each in their
        order.

        Names and addresses are distinct: of two entries that lead to one address the first counts. At most
        MAX_ENDPOINTS.
        """
        specs: dict[str, EndpointSpec] = {}
        taken: set[str] = set()
        made, self._made = self._made, {}

        for entries in self._all():
            for entry in entries.addresses:
                if (place := entry.place) not in specs and len(specs) < MAX_ENDPOINTS:
                    name = entry.name if entry.name not in taken else f"{entry.name}/{entry.authority}"
                    known, spec = made.get(place, (None, None))
                    if spec is None or known is not entry or spec.name != name or entry.tls.ca is not None:
                        spec = spec_of(entry, name, entries.certificates)  # a thousand take 10 ms
                    self._made[place] = entry, spec
                    specs[place] = spec
                    taken.add(name)
        for entries in self._all():
            for one in entries.names:
                make = MemberSpecs(one.entry, entries.certificates)
                for member in one.members:
                    if member.authority not in specs and len(specs) < MAX_ENDPOINTS:
                        spec = specs[member.authority] = make(member, taken)
                        taken.add(spec.name)
        return list(specs.values())

    async def resolve_once(self) -> None:
        """Read every file, then resolve every name, all at the same time."""
        for file in self.files:
            await self._read(file, tuple)
        await asyncio.gather(*(self._resolve(name, tuple) for name in self.names))

    def loops(self, runtime: Runtime, publish: Publish) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """One loop for each name and each file, and what to call it, for `control.loops.supervise`."""
        for name in self._root.names:
            yield f"discovery of {name.entry.name}", partial(self._follow, name, runtime, publish)
        for file in self.files:
            yield f"discovery of {file.entry.name}", partial(self._follow_file, file, runtime, publish)

    # Names

    async def _follow(self, name: Known, runtime: Runtime, publish: Publish) -> None:
        while True:
            began_at = runtime.now()
            before, was_good = name.members, name.problem is None
            await self._resolve(name, lambda: _down(runtime.snapshot().endpoints))
            if was_good != (name.problem is None):
                _log_problem(name)
            if name.members != before:
                await asyncio.sleep(0)  # both take about 10 ms for 1,000 addresses: requests may go between
                authorities = [one.authority for one in before]
                if name.authorities != authorities:  # else only weights are others
                    _log_change(name.entry, authorities, name.authorities, name.found)
                publish(self.endpoints)
            interval_s = self._settings.dns.interval
            if OK not in name.results:
                interval_s = min(interval_s, FIRST_RETRY_S)
            due_at = began_at + interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
            await asyncio.sleep(max(0.0, due_at - runtime.now()))

    async def _resolve(self, name: Known, down: Callable[[], Collection[str]]) -> None:
        if isinstance(name, KnownName):
            name.hear(await self._resolver.lookup(name.host), down)
            return
        services = await self._resolver.services(name.host)
        few = asyncio.Semaphore(TARGETS_AT_ONCE)

        async def lookup(target: str) -> Lookup:
            async with few:
                return await self._resolver.lookup(f"{target}.")  # it is absolute: no search list

        targets = name.targets(services)
        name.hear(services, dict(zip(targets, await asyncio.gather(*map(lookup, targets)), strict=True)), down)

    # Files

    async def _follow_file(self, file: EndpointFile, runtime: Runtime, publish: Publish) -> None:
        """Until cancelled, with the loops of the names in it."""
        followed: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                before, problem = file.known, file.problem
                if await self._is_new(file) or file.empty:
                    await self._read(file, lambda: _down(runtime.snapshot().endpoints))
                if file.problem != problem:
                    _log_file_problem(file)
                if file.known is not before:
                    _log_change(file.entry, _shown(before), _shown(file.known), len(file.known.entries))
                    warn_of_unverified(file.known.entries)
                    publish(self.endpoints)
                names = {id(name): name for name in file.known.names}
                for key in followed.keys() - names.keys():
                    followed.pop(key).cancel()
                for key, name in names.items():
                    if key not in followed:
                        run = partial(self._follow, name, runtime, publish)
                        loop = supervise(f"discovery of {name.entry.name}", run, self._rng)
                        followed[key] = group.create_task(loop)
                await asyncio.sleep(LOOK_S * self._rng.uniform(1 - JITTER, 1 + JITTER))

    async def _is_new(self, file: EndpointFile) -> bool:
        """Whether another version than the one that was read last is there, and whole."""
        now = await asyncio.to_thread(_look, file.entry.path)
        first, settled = not file.results, now == file.seen
        file.seen = now
        return first or (settled and now != file.read)

    async def _read(self, file: EndpointFile, down: Callable[[], Collection[str]]) -> None:
        """Take over what a file says, as far as it is to be believed."""
        path, again = file.entry.path, file.empty
        looked = await asyncio.to_thread(_look, path)
        try:
            entries, certificates = await asyncio.to_thread(_read_endpoints, path, self._settings)
        except ConfigError as error:
            file.note("invalid", "; ".join(error.problems[:MAX_LOGGED]))
            file.empty = False
        except OSError as error:
            file.note("unreadable", _unreadable(error))
            file.empty = False
        else:
            if not (again and not entries):
                file.note("ok", None)
            file.empty = not entries
            if not entries:
                entries, certificates = file.known.up(down()), file.known.certificates
            if (entries, certificates) != (file.known.entries, file.known.certificates):
                known = Entries(entries, certificates, self._own, file.known.names)
                # As with a reload: without their addresses, names that replace them would empty the pool.
                await asyncio.gather(*(self._resolve(name, down) for name in known.names if not name.results))
                file.known = known
        file.seen = file.read = looked


def _shown(entries: Entries) -> list[str]:
    return [one.place for one in entries.entries]


def _down(endpoints: Sequence[EndpointSnapshot]) -> set[str]:
    """The `host:port` of members that are down. One that is leaving may have a successor there, which stands before."""
    health: dict[str, Health] = {}
    for one in endpoints:
        health.setdefault(one.endpoint.place, one.health)
    return {place for place, verdict in health.items() if verdict is Health.DOWN}


def _log_change(entry: EndpointSettings, before: Sequence[str], now: Sequence[str], found: int) -> None:
    old, new = set(before), set(now)
    added, removed = [one for one in now if one not in old], [one for one in before if one not in new]
    extra: dict[str, object] = {"event": "discovery", "source": entry.name, "endpoints": len(now)}
    extra |= {"added": added[:MAX_LOGGED], "removed": removed[:MAX_LOGGED]}
    text = "%s has %d %s%s: added %s; removed %s"
    what = "endpoints" if entry.is_file else "addresses"
    cut = f" (of {found})" if found > len(now) else ""
    logger.info(text, entry.name, len(now), what, cut, _some(added), _some(removed), extra=extra)


def _log_file_problem(file: EndpointFile) -> None:
    extra: dict[str, object] = {"event": "discovery", "source": file.entry.name, "endpoints": len(file.known.entries)}
    if file.problem is None:
        logger.info("%s can be read again", file.entry.name, extra=extra)
        return
    text = "%s is refused, so what is known of it stays (%d endpoints): %s"
    extra["reason"] = file.problem
    logger.warning(text, file.entry.name, len(file.known.entries), file.problem, extra=extra)


def warn_of_unverified(entries: Sequence[EndpointSettings]) -> None:
    """A line of the log for those whose certificates nobody looks at, if there are such."""
    names = [one.name for one in entries if not one.tls.verify]
    if names:
        text = "the certificates of %s are not verified (tls.verify: false): an attacker can read and change everything"
        logger.warning(text, _some(names))


def _log_problem(name: Known) -> None:
    extra: dict[str, object] = {"event": "discovery", "source": name.entry.name, "endpoints": len(name.authorities)}
    if name.problem is None:
        logger.info("%s can be resolved again", name.entry.name, extra=extra)
        return
    text = "%s cannot be resolved, so its addresses stay (%d addresses): %s"
    extra["reason"] = name.problem
    logger.warning(text, name.entry.name, len(name.authorities), name.problem, extra=extra)


def _some(authorities: Sequence[str]) -> str:
    more = f" and {len(authorities) - MAX_LOGGED} more" if len(authorities) > MAX_LOGGED else ""
    return (", ".join(authorities[:MAX_LOGGED]) or "none") + more
