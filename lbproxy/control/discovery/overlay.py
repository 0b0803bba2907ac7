# SPDX-License-Identifier: Apache-2.0
"""Endpoints that the admin API added to those of the settings file, and those that it removed from them.

They live in memory: a restart begins with the file alone. A reload drops those that were not to be kept; one that is
in the file by then is the file's. With worker processes the supervisor has them as well, as `Changes`: a balancer
process after another makes the same overlay again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lbproxy.config.parse import with_endpoints
from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings

SOURCE = "the endpoint"


class UnknownEntryError(LookupError):
    """There is no endpoint of that name in the settings."""


class Addition(NamedTuple):
    """An endpoint that was added."""

    entry: Mapping[str, object]
    """As a settings file would say it."""
    keep: bool
    """A reload keeps it."""


class Changes(NamedTuple):
    """An overlay as plain data, for another process."""

    added: tuple[Addition, ...] = ()
    removed: tuple[str, ...] = ()
    """Names of endpoints of the settings file."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """What was added and removed. A change makes another."""

    added: Mapping[str, bool] = field(default_factory=dict)
    """By endpoint: whether a reload keeps it."""
    entries: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By endpoint that was added: its entry, as a settings file would say it."""
    removed: tuple[str, ...] = ()
    """Names of endpoints of the settings file, until a reload brings them back."""

    @property
    def changes(self) -> Changes:
        """For `again`."""
        return Changes(tuple(Addition(self.entries[name], keep) for name, keep in self.added.items()), self.removed)

    @classmethod
    def again(cls, settings: Settings, changes: Changes) -> tuple[Overlay, Settings]:
        """Make the same changes to the same settings in another process. Raises ConfigError, UnknownEntryError if they
        are not the same.
        """
        overlay = cls()
        for entry, keep in changes.added:
            overlay, settings = overlay.add(settings, entry, keep=keep)
        for name in changes.removed:
            overlay, settings = overlay.remove(settings, name)
        return overlay, settings

    def add(self, settings: Settings, entry: Mapping[str, object], *, keep: bool) -> tuple[Overlay, Settings]:
        """With one more endpoint, as a settings file would say it. Raises ConfigError with all that is wrong."""
        try:
            changed = with_endpoints(settings, [*settings.endpoints, entry], source=SOURCE)
        except ConfigError as error:
            last = f"endpoints[{len(settings.endpoints)}]"
            raise ConfigError(SOURCE, [_own_path(one, last) for one in error.problems]) from None
        if changed.endpoints[-1].names_files:
            raise ConfigError(SOURCE, ["endpoint: expected no files, which only the settings file may name"])
        name = changed.endpoints[-1].name
        return replace(self, added={**self.added, name: keep}, entries={**self.entries, name: entry}), changed

    def remove(self, settings: Settings, name: str) -> tuple[Overlay, Settings]:
        """Without one. Raises UnknownEntryError; ConfigError for the last one."""
        left = [one for one in settings.endpoints if one.name != name]
        if len(left) == len(settings.endpoints):
            raise UnknownEntryError(name)
        overlay = self._without(name) if name in self.added else replace(self, removed=(*self.removed, name))
        return overlay, with_endpoints(settings, left, source=SOURCE)

    def _without(self, name: str) -> Overlay:
        added = {one: keep for one, keep in self.added.items() if one != name}
        return replace(self, added=added, entries={one: self.entries[one] for one in added})

    def over(self, before: Settings, fresh: Settings) -> tuple[Overlay, Settings]:
        """After a reload. `before`: what was in force; `fresh`: what the file says. Raises ConfigError."""
        names = {one.name for one in fresh.endpoints}
        places = {one.place for one in fresh.endpoints}
        kept: list[EndpointSettings] = [
            one
            for one in before.endpoints
            if self.added.get(one.name) and one.name not in names and one.place not in places
        ]
        if not kept:
            return Overlay(), fresh
        overlay = Overlay({one.name: True for one in kept}, {one.name: self.entries[one.name] for one in kept})
        return overlay, with_endpoints(fresh, [*fresh.endpoints, *kept], source="the settings and added endpoints")


def _own_path(problem: str, last: str) -> str:
    """`endpoints[7].url: ...` is `url: ...` to whoever said one endpoint."""
    path, colon, wrong = problem.partition(": ")
    return f"{path.removeprefix(last).lstrip('.') or 'endpoint'}{colon}{wrong}"
