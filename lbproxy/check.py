"""`lbproxy check`: every endpoint dialled once, and a table of what was found and what is missing."""

from __future__ import annotations

import asyncio
import random

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lbproxy.config import Settings
from lbproxy.control.discovery import Discovery
from lbproxy.control.inspect import Inspection, inspect
from lbproxy.net.pool import ConnectionPool

COSTS = {
    "waiting": "the load that others put there is not seen",
    "running": "the load that others put there is not seen",
    "kv_utilization": "scorers that look at the cache rate it last",
    "block_size_tokens": "nothing yet",
    "kv_blocks": "nothing yet",
}
"""What a missing signal means for routing."""


async def check(settings: Settings, console: Console | None = None) -> int:
    """Dial every endpoint and print what was found. Returns 0 if at least one endpoint can be used, else 1."""
    connections = ConnectionPool()
    discovery = Discovery(settings, random.Random())  # noqa: S311 - nothing is random in one resolution
    try:
        await discovery.resolve_once()
        found = await asyncio.gather(
            *(inspect(spec, connections, settings.health, settings.scrape) for spec in discovery.endpoints())
        )
    finally:
        discovery.close()
        connections.close()
    console = console or Console(highlight=False, soft_wrap=True)
    console.print("The settings are valid.")
    console.print(_table(found))
    for name in discovery.names:
        if name.problem is not None:
            console.print(Text(f"{name.entry.name}: cannot be resolved: {name.problem}", style="red"))
    for one in found:
        for problem in one.problems if one.reachable else one.problems[:1]:
            console.print(Text(f"{one.endpoint.name}: {problem}", style="yellow" if one.usable else "red"))
        for signal in one.missing:
            console.print(Text(f"{one.endpoint.name}: its metrics lack {signal}: {COSTS[signal]}", style="yellow"))
    usable = sum(one.usable for one in found)
    console.print(f"{usable} of {len(found)} endpoints can be used.")
    return 0 if usable else 1


def _table(found: list[Inspection]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("endpoint", "usable", "engine", "models", "load signals"):
        table.add_column(heading, overflow="fold")
    for one in found:
        signals = len(one.present)
        table.add_row(
            f"{one.endpoint.name}\n{one.endpoint.base_url}"
            if one.endpoint.name not in one.endpoint.base_url
            else one.endpoint.name,
            Text("yes", style="green") if one.usable else Text("no", style="red"),
            one.engine or "-",
            _models(one),
            f"{signals} of {signals + len(one.missing)}" if one.engine else "-",
        )
    return table


def _models(one: Inspection) -> str:
    if one.models is None:
        return "it does not say" if one.reachable else "-"
    adapters = [f"{name} (adapter of {base})" for base, names in one.adapters.items() for name in names]
    return "\n".join([*one.models, *adapters]) or "none"
