# SPDX-License-Identifier: Apache-2.0
"""Endpoints that the admin API added to those of the settings file, and those that it removed from them.

They live in memory: a restart begins with the file alone. A reload drops those that were not to be kept; one that is
in the file by then is the file's. With worker processes the supervisor has them as well, as `Changes`: a balancer
process after another makes the same overlay again.

An endpoint that registered itself has a `Lease`: it stays until that was not renewed for its time. A renewal changes
the lease alone, whatever the fleet's size. Reloads keep it; a process after this one begins it anew, as nobody could
renew it in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import orjson

from lbproxy.config.parse import name_of_entry, with_endpoint, with_endpoints
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings

logger = logging.getLogger("lbproxy")

SOURCE = "the endpoint"
LEASES_LOOK_S: Final = 0.5
"""Between two looks whether a lease ended."""


class UnknownEntryError(LookupError):
    """There is no endpoint of that name in the settings."""


class NotLeasedError(LookupError):
    """There is an endpoint of that name, and it has no lease."""


@dataclass(slots=True)
class Lease:
    """Of an endpoint that registered itself."""

    ttl_s: float
    ends_at: float

    @classmethod
    def begin(cls, ttl_s: float, now: float) -> Lease:
        return cls(ttl_s, now + ttl_s)


class Addition(NamedTuple):
    """An endpoint that was added."""

    entry: Mapping[str, object]
    """As a settings file would say it."""
    keep: bool
    """A reload keeps it."""
    lease: Lease | None = None
    """None: it stays until it is removed."""

    def to_text(self) -> str:
        """A line for another process."""
        ttl_s = None if self.lease is None else self.lease.ttl_s
        return orjson.dumps([self.entry, self.keep, ttl_s]).decode()

    @classmethod
    def from_text(cls, text: str, now: float) -> Addition:
        """Of such a line. A lease begins anew. Raises ValueError, TypeError if it is none."""
        entry, keep, ttl_s = orjson.loads(text)
        return cls(dict(entry), bool(keep), None if ttl_s is None else Lease.begin(float(ttl_s), now))


class Changes(NamedTuple):
    """An overlay as plain data, for another process."""

    added: tuple[Addition, ...] = ()
    removed: tuple[str, ...] = ()
    """Names of endpoints of the settings file."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """What was added and removed. A change makes another; but leases are renewed where they are."""

    added: Mapping[str, Addition] = field(default_factory=dict)
    """By endpoint."""
    removed: tuple[str, ...] = ()
    """Names of endpoints of the settings file, until a reload brings them back."""

    @property
    def changes(self) -> Changes:
        """For `again`."""
        return Changes(tuple(self.added.values()), self.removed)

    @property
    def leased(self) -> list[str]:
        """Those that have a lease, as lines for a process after this one."""
        return [one.to_text() for one in self.added.values() if one.lease is not None]

    @classmethod
    def again(cls, settings: Settings, changes: Changes) -> tuple[Overlay, Settings]:
        """Make the same changes to the same settings in another process. Raises ConfigError, UnknownEntryError if they
        are not the same; what is leased and does not fit any more is left out.
        """
        overlay = cls()
        for entry, keep, lease in changes.added:
            try:
                overlay, settings = overlay.add(settings, entry, keep=keep, lease=lease)
            except ConfigError as error:
                if lease is None:
                    raise
                text = "an endpoint that registered itself is left out: %s"
                logger.warning(text, "; ".join(error.problems), extra={"event": "admin"})
        return overlay.remove(settings, *changes.removed) if changes.removed else (overlay, settings)

    @classmethod
    def inherited(cls, settings: Settings, lines: Iterable[str], now: float) -> tuple[Overlay, Settings]:
        """With the endpoints that registered with the process before this one, whose `leased` these are."""
        added = []
        for line in lines:
            try:
                added.append(Addition.from_text(line, now))
            except (TypeError, ValueError):
                logger.warning("what another version of lbproxy handed over is not read", extra={"event": "admin"})
        return cls.again(settings, Changes(tuple(added)))

    def add(
        self, settings: Settings, entry: Mapping[str, object], *, keep: bool, lease: Lease | None = None
    ) -> tuple[Overlay, Settings]:
        """With one more endpoint, as a settings file would say it. Raises ConfigError with all that is wrong."""
        try:
            changed = with_endpoint(settings, entry, source=SOURCE)
        except ConfigError as error:
            last = f"endpoints[{len(settings.endpoints)}]"
            raise ConfigError(SOURCE, [_own_path(one, last) for one in error.problems]) from None
        if changed.endpoints[-1].names_files:
            raise ConfigError(SOURCE, ["endpoint: expected no files, which only the settings file may name"])
        name = changed.endpoints[-1].name
        return replace(self, added={**self.added, name: Addition(entry, keep, lease)}), changed

    def remove(self, settings: Settings, *names: str) -> tuple[Overlay, Settings]:
        """Without some. Raises UnknownEntryError; ConfigError if none would be left, and one of them has no lease."""
        left = [one for one in settings.endpoints if one.name not in names]
        unknown = {*names} - {one.name for one in settings.endpoints}
        if unknown:
            raise UnknownEntryError(", ".join(sorted(unknown)))
        if not left and any(self.lease_of(name) is None for name in names):
            raise ConfigError(SOURCE, ["endpoints: expected at least one that is left"])
        added = {name: one for name, one in self.added.items() if name not in names}
        removed = (*self.removed, *(name for name in names if name not in self.added))
        return Overlay(added, removed), settings.model_copy(update={"endpoints": tuple(left)})

    def over(self, before: Settings, fresh: Settings) -> tuple[Overlay, Settings]:
        """After a reload. `before`: what was in force; `fresh`: what the file says. What is leased and does not fit any
        more is left out. Raises ConfigError.
        """
        names = {one.name for one in fresh.endpoints}
        places = {one.place for one in fresh.endpoints}
        stay = {name for name, one in self.added.items() if one.keep or one.lease is not None}
        stay = {one.name for one in before.endpoints if one.name in stay - names and one.place not in places}
        if not stay:
            return Overlay(), fresh
        overlay = Overlay({name: one for name, one in self.added.items() if name in stay})
        entries = [one.entry for one in overlay.added.values()]
        try:
            source = "the settings and added endpoints"
            return overlay, with_endpoints(fresh, [*fresh.endpoints, *entries], source=source)
        except ConfigError:
            if not overlay.leased:
                raise
            return Overlay.again(fresh, overlay.changes)

    # Leases

    def lease_of(self, name: str) -> Lease | None:
        """The lease of an endpoint; None: it has none."""
        found = self.added.get(name)
        return None if found is None else found.lease

    def rest_s(self, name: str, now: float) -> float | None:
        """How long an endpoint stays unless its lease is renewed; None: it has none."""
        lease = self.lease_of(name)
        return None if lease is None else max(0.0, lease.ends_at - now)

    def prolong(self, name: str, now: float) -> None:
        """Begin a lease anew, if there is one."""
        if (lease := self.lease_of(name)) is not None:
            lease.ends_at = now + lease.ttl_s

    def renew(self, settings: Settings, entry: Mapping[str, object], ttl_s: float, now: float) -> str | None:
        """Renew the lease of an endpoint that is as `entry` says; returns its name. None: nothing has such a lease."""
        name = name_of_entry(settings, entry) or ""
        found = self.added.get(name)
        if found is None or found.lease is None or found.entry != entry or now >= found.lease.ends_at:
            return None
        found.lease.ttl_s = ttl_s
        self.prolong(name, now)
        return name

    def register(self, settings: Settings, entry: Mapping[str, object], lease: Lease) -> tuple[Overlay, Settings, bool]:
        """With an endpoint that registers itself, in place of one that has its name; and whether there was none. Raises
        NotLeasedError if that has no lease; ConfigError.
        """
        name = name_of_entry(settings, entry)
        is_new = all(one.name != name for one in settings.endpoints)
        overlay = self
        if not is_new and name is not None:
            if self.lease_of(name) is None:
                raise NotLeasedError(name)
            overlay, settings = self.remove(settings, name)
        return *overlay.add(settings, entry, keep=False, lease=lease), is_new

    def check_registered(self, settings: Settings, name: str, url: str) -> None:
        """That an endpoint registered itself by this URL, as it wrote it. Raises UnknownEntryError, NotLeasedError."""
        found = self.added.get(name)
        if found is None or found.lease is None or found.entry.get("url") != url:
            known = any(one.name == name for one in settings.endpoints)
            raise NotLeasedError(name) if known else UnknownEntryError(name)

    def ended(self, now: float, looked_at: float) -> list[str]:
        """Names of those whose lease ended. `looked_at`: when this was asked before: if that is long ago, the process
        stood still, and renewals may wait to be read: all leases are prolonged by that time.
        """
        leases = {name: one.lease for name, one in self.added.items() if one.lease is not None}
        late_s = now - looked_at - 2 * LEASES_LOOK_S
        if late_s > 0.0:
            for lease in leases.values():
                lease.ends_at += late_s
        return [name for name, lease in leases.items() if now >= lease.ends_at]


def _own_path(problem: str, last: str) -> str:
    """`endpoints[7].url: ...` is `url: ...` to whoever said one endpoint."""
    path, colon, wrong = problem.partition(": ")
    return f"{path.removeprefix(last).lstrip('.') or 'endpoint'}{colon}{wrong}"
