"""Endpoints that the admin API added to those of the settings file.

They live in memory: a restart begins with the file alone. A reload drops those that were not to be kept; one that is
in the file by then is the file's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lbproxy.config.parse import with_endpoints
from lbproxy.config.sections.endpoints import EndpointSettings
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings

SOURCE = "the endpoint"


class UnknownEntryError(LookupError):
    """There is no endpoint of that name in the settings."""


@dataclass(frozen=True, slots=True)
class Overlay:
    """What was added. A change makes another."""

    added: Mapping[str, bool] = field(default_factory=dict)
    """By name, whether a reload keeps it."""

    def add(self, settings: Settings, entry: Mapping[str, object], *, keep: bool) -> tuple[Overlay, Settings]:
        """With one more endpoint, as a settings file would say it. Raises ConfigError with all that is wrong."""
        try:
            changed = with_endpoints(settings, [*settings.endpoints, entry], source=SOURCE)
        except ConfigError as error:
            last = f"endpoints[{len(settings.endpoints)}]"
            raise ConfigError(SOURCE, [_own_path(one, last) for one in error.problems]) from None
        if changed.endpoints[-1].names_files:
            raise ConfigError(SOURCE, ["endpoint: expected no files, which only the settings file may name"])
        return Overlay({**self.added, changed.endpoints[-1].name: keep}), changed

    def remove(self, settings: Settings, name: str) -> tuple[Overlay, Settings]:
        """Without one. Raises UnknownEntryError; ConfigError for the last one."""
        left = [one for one in settings.endpoints if one.name != name]
        if len(left) == len(settings.endpoints):
            raise UnknownEntryError(name)
        added = {one: keep for one, keep in self.added.items() if one != name}
        return Overlay(added), with_endpoints(settings, left, source=SOURCE)

    def over(self, before: Settings, fresh: Settings) -> tuple[Overlay, Settings]:
        """After a reload. `before`: what was in force; `fresh`: what the file says. Raises ConfigError."""
        names = {one.name for one in fresh.endpoints}
        urls = {one.url for one in fresh.endpoints}
        kept: list[EndpointSettings] = [
            one
            for one in before.endpoints
            if self.added.get(one.name) and one.name not in names and one.url not in urls
        ]
        if not kept:
            return Overlay(), fresh
        overlay = Overlay({one.name: True for one in kept})
        return overlay, with_endpoints(fresh, [*fresh.endpoints, *kept], source="the settings and added endpoints")


def _own_path(problem: str, last: str) -> str:
    """`endpoints[7].url: ...` is `url: ...` to whoever said one endpoint."""
    path, colon, wrong = problem.partition(": ")
    return f"{path.removeprefix(last).lstrip('.') or 'endpoint'}{colon}{wrong}"
