# SPDX-License-Identifier: Apache-2.0
"""`lbproxy check`: every endpoint dialled once, and a table for each of what was found and what is missing; then the
store of the replicas, if there is one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lbproxy import __version__
from lbproxy.commands.tables import plain
from lbproxy.config.publishers import overlap, read_publisher
from lbproxy.config.sections.replicas import ReplicasSettings
from lbproxy.config.shown import without_parts_of
from lbproxy.config.tree import Settings
from lbproxy.control.admin.key_files import Credentials, read_credentials
from lbproxy.control.discovery.discovery import Discovery
from lbproxy.control.probing.inspect import Inspection, ShownLoad, inspect
from lbproxy.control.saving import state_file
from lbproxy.core.endpoints.endpoint import EndpointSpec
from lbproxy.core.engines.dialects import Engines
from lbproxy.core.engines.handover import CONNECTORS, Role
from lbproxy.core.engines.pairing import find_problems, states_role
from lbproxy.core.engines.readings import MAX_LORA
from lbproxy.core.engines.server_info import SERVER_INFO
from lbproxy.core.policies.ignored import ignored_settings
from lbproxy.extras.kv_events import find_kv_events
from lbproxy.extras.replication import dial, find_store, without_password
from lbproxy.extras.store import StoreError
from lbproxy.extras.tracing import find_traces
from lbproxy.net.connections.pool import ConnectionPool

COSTS = {
    "waiting": "requests of other clients in its queue are unknown",
    "running": "running requests of other clients are unknown",
    "kv_utilization": "scorers that use the cache rate it last",
    "block_size_tokens": "adaptive assumes a large cache",
    "kv_blocks": "adaptive assumes a large cache",
    MAX_LORA: "adaptive assumes 4 adapters at a time",
}
"""What a missing signal means for routing."""
NO_LOAD = "only lbproxy's own requests there count"
ASKED = "lbproxy will request load reports in its responses"
NOT_ASKED = "no load reports: it has several ranks or processes, and each reports only its own load"
MAX_NAMES_SHOWN = 10


async def check(settings: Settings, console: Console, *, strict: bool = False) -> int:
    """Dial every endpoint and print what was found. Returns 0 if at least one can be used, or there are none; else 1.
    `strict`: also 1 if one cannot be used, or anything was warned of.

    Raises ConfigError if the files that the settings name cannot be used, or a package that they need is missing.
    """
    credentials = await asyncio.to_thread(read_credentials, settings)
    await asyncio.to_thread(find_traces, settings)
    await asyncio.to_thread(find_store, settings.replicas)
    await asyncio.to_thread(find_kv_events, settings.endpoints)
    connections = ConnectionPool()
    discovery = Discovery(settings, random.Random())  # noqa: S311 - nothing is random in one resolution
    engines = Engines(settings.engines)
    try:
        await discovery.resolve_once()
        found = await asyncio.gather(
            *(inspect(spec, connections, settings.health, settings.scrape, engines) for spec in discovery.endpoints())
        )
    finally:
        discovery.close()
        connections.close()
    console.print("The settings are valid.")
    console.print(_asked_for(credentials))
    console.print(_rules(settings))
    for one in found:
        console.print(Text(f"\n{_title(one)}", style="bold"))
        console.print(_table(one) if console.is_terminal else _lines(one))
    store = None if settings.replicas.url is None else await _replicas(settings.replicas)
    if store is not None:
        console.print(store)
    unfollowed = _unfollowed(discovery)
    for problem in unfollowed:
        console.print(Text(problem, style="red"))
    warnings = (
        *_ignored(settings, found),
        *_unverified(settings),
        *_keyless(settings),
        *settings.flows.unused({*credentials.keys.values()}),
        *_unserved(settings, found),
        *_unkept(settings),
        *find_problems([one.part for one in found if one.reachable]),
    )
    for warning in warnings:
        console.print(Text(f"\n{plain(warning)}", style="yellow"))
    usable = sum(one.usable for one in found)
    if not settings.endpoints:
        console.print("\nThere are no endpoints until some register (`lbproxy register`).")
    else:
        console.print(f"\n{usable} of {len(found)} endpoints can be used.")
    if strict and (usable < len(found) or unfollowed or warnings or (store is not None and store.style != "green")):
        return 1
    return 0 if usable or not settings.endpoints else 1


def _unfollowed(discovery: Discovery) -> list[str]:
    """Files and names of `endpoints` that gave none."""
    files = [f"{one.entry.name}: cannot be used: {one.problem}" for one in discovery.files if one.problem is not None]
    names = [
        f"{one.entry.name}: cannot be resolved: {one.problem}" for one in discovery.names if one.problem is not None
    ]
    return files + names


def _asked_for(credentials: Credentials) -> str:
    """Of clients. Names only; the keys themselves are not known any more."""
    names = sorted(set(credentials.keys.values()))
    keys = f"API keys: {len(credentials.keys)} ({_some(names)})" if names else "API keys: none, open to every client"
    return f"{'HTTPS' if credentials.tls else 'HTTP'}; {keys}."


def _rules(settings: Settings) -> str:
    """What happens to an endpoint that fails, and to one that comes back; and what requests are told more."""
    breaker, slow_start = settings.breaker, settings.health.slow_start
    failures = f"{breaker.consecutive_failures} failures in a row" if breaker.consecutive_failures else ""
    rate = f"less than {breaker.success_rate:.0%} successful responses" if breaker.success_rate else ""
    why = " or ".join(filter(None, (failures, rate)))
    times = f"for {breaker.ejection:g} s, then longer, {breaker.max_ejection:g} s at most"
    ejected = f"{why} eject an endpoint {times}" if why else "no endpoint is ejected for failures"
    back = f"its share grows for {slow_start:g} s" if slow_start else "it has a full share at once"
    usage = {"auto": "where a limit of tokens or `continue` applies", "always": "always", "never": "never"}
    asked = f"Servers are asked for the usage of streams: {usage[settings.usage.ask]}."
    return f"Routing by {settings.routing.policy}; {ejected}; when it returns, {back}.\n{asked}"


async def _replicas(settings: ReplicasSettings) -> Text:
    """Whether the store of the replicas can be used, and which replicas are alive."""
    assert settings.url is not None
    url = without_password(settings.url.get_secret_value())
    try:
        others = await dial(settings)
    except StoreError as error:
        problem = without_parts_of(str(error), settings.url.get_secret_value())
        text = f"\nreplicas: {url} cannot be used, so lbproxy would go on alone: {problem}{_hint(url, problem)}"
        return Text(text, style="red")
    versions = {version for _, version in others} - {__version__}
    listed = _some([f"{name} ({version})" for name, version in others]) or "none"
    text = f"\nreplicas: {url} can be used; pool {settings.pool}, replicas that are alive: {plain(listed)}."
    if versions:
        text += f" This one is {__version__}: replicas of different versions may not understand each other."
    return Text(text, style="yellow" if versions else "green")


def _hint(url: str, problem: str) -> str:
    """What may be wrong, where the error does not say so: about TLS a server only closes, or is silent."""
    if url.startswith("rediss"):
        return " (perhaps it does not use TLS: redis://)" if "no response" in problem or "SSL" in problem else ""
    return " (perhaps it wants TLS: rediss://)" if "reset" in problem or "closed" in problem else ""


def _ignored(settings: Settings, found: Sequence[Inspection]) -> Iterator[str]:
    for key, why in ignored_settings(settings, [one.endpoint for one in found]):
        yield f"{key} is ignored under policy {settings.routing.policy}: {why}."


def _unverified(settings: Settings) -> Iterator[str]:
    names = [one.name for one in settings.endpoints if not one.tls.verify]
    if names:
        yield f"The certificates of {_some(names)} are not verified (tls.verify: false)."


def _keyless(settings: Settings) -> Iterator[str]:
    """Endpoints elsewhere that would get clients' credentials."""
    requires_keys = bool(settings.auth.keys) or settings.auth.file is not None
    names = [one.name for one in settings.endpoints if one.tier > 1 and one.api_key is None]
    if names and not requires_keys:
        yield f"{_some(names)}: above tier 1 without api_key, so clients' own Authorization is sent there."


def _unkept(settings: Settings) -> Iterator[str]:
    """That what is learned will be lost."""
    file = settings.state.file
    names = [one.name for one in settings.endpoints if one.tokens_per_day is not None]
    if file is None and names:
        yield f"{_some(names)}: tokens_per_day without state.file, so each restart of lbproxy begins a new day."
    problem = None if file is None else state_file.problem(file)
    if problem is not None:
        yield f"state.file: {file} cannot be written: {problem}. lbproxy will start as new each time."


def _unserved(settings: Settings, found: Sequence[Inspection]) -> Iterator[str]:
    """Names of the settings' `models`, and of models of flows, that lead to what no endpoint says that it serves."""
    if any(one.usable and one.models is None for one in found) or not any(one.usable for one in found):
        return  # it may serve them
    served = {name for one in found for name in one.models or ()}
    served |= {name for one in found for names in one.adapters.values() for name in names}
    for name, alias in settings.models.items():
        missing = [target for target, share in alias.shares.items() if share and target not in served]
        if missing:
            yield f"models.{plain(name)}: no endpoint serves {plain(_some(missing))}, so its requests get 404."
        missing = [target for target in alias.fallback if target not in served]
        if missing:
            yield f"models.{plain(name)}.fallback: no endpoint serves {plain(_some(missing))}."
    flows = settings.flows
    for place, rule in {
        "default": flows.default,
        **{f"named.{name}": one for name, one in flows.named.items()},
    }.items():
        missing = [one for one in rule.models or () if "*" not in one and one not in served | settings.models.keys()]
        if missing:
            yield f"flows.{place}.models: no endpoint serves {plain(_some(missing))}, and no alias is called so."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")


def _title(one: Inspection) -> str:
    name, url = one.endpoint.name, one.endpoint.base_url
    return name if name in url else f"{name}  {url}"


def _lines(one: Inspection) -> Text:
    """The same for a file or a pipe: a line each, however long, without padding."""
    return Text("\n").join(Text(f"  {key:9}  ").append_text(text) for key, text in _rows(one))


def _table(one: Inspection) -> Table:
    """What was found of one endpoint."""
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for key, text in _rows(one):
        table.add_row(key, text)
    return table


def _rows(one: Inspection) -> Iterator[tuple[str, Text]]:
    usable = Text("yes", style="green") if one.usable else Text("no", style="red")
    yield "usable", usable
    if one.endpoint.proxy is not None:
        shown = "***@" if one.endpoint.proxy.credentials is not None else ""
        yield "proxy", Text(f"http://{shown}{one.endpoint.proxy}")
    answered = "yes" if one.reachable else "no"
    yield "reachable", Text(f"{answered}; health: {one.health}", style="" if one.reachable else "red")
    for problem in one.problems if one.reachable else one.problems[:1]:
        if problem != one.health:
            yield "problem", Text(plain(problem), style="yellow" if one.usable else "red")
    if not one.reachable:
        return
    yield "engine", Text(_engine(one))
    if one.shown.engine is None and one.endpoint.metrics is not None:
        hint = (
            f"; {one.owner} exports it if it is started with {SERVER_INFO[one.owner].metrics_option}"
            if one.owner
            else ""
        )
        yield "missing", Text(f"all of its load: {NO_LOAD}{hint}", style="yellow")
    yield "models", Text("unknown" if one.models is None else _listed(one.models))
    for text in _contexts(one):
        yield "context", Text(text)
    if one.adapters:
        named = [f"{name} (of {base})" for base, names in one.adapters.items() for name in names]
        yield "adapters", Text(_listed(named))
    if one.shown.engine and one.endpoint.metrics is not None:
        lacking = sum(signal != MAX_LORA for signal in one.shown.missing)
        yield "load", Text(f"{len(one.shown.present)} of {len(one.shown.present) + lacking} signals{_values(one)}")
    yield from _ranks(one)
    yield from _kv_events(one.endpoint, one.endpoint.ranks or one.shown.ranks)
    yield from _handover(one)
    yield from _kv_cache(one)
    said = one.said
    slots = (
        one.shown.metrics.slots
        if one.shown.metrics is not None and one.shown.metrics.slots is not None
        else said and said.slots
    )
    if slots is not None:
        yield "slots", Text(f"{slots:,} requests at a time, as it reports")
    if one.shown.asks_load is not None:
        yield "reports", Text(ASKED if one.shown.asks_load else NOT_ASKED)
    yield from _signals(one.shown)


def _signals(shown: ShownLoad) -> Iterator[tuple[str, Text]]:
    """Which metric is read where several differ, and what is missing."""
    for signal, why in shown.why.items():
        yield "read", Text(f"{signal} by {plain(why)}")
    for signal in shown.missing:
        yield "missing", Text(f"{signal}: {COSTS[signal]}", style="yellow")
    for cost in dict.fromkeys(COSTS[signal] for signal in shown.lacking):
        signals = ", ".join(signal for signal in shown.lacking if COSTS[signal] == cost)
        yield "no signal", Text(f"{signals}: {cost}", style="dim")


def _contexts(one: Inspection) -> Iterator[str]:
    """How long a request may be, by model if they differ."""
    cards = [card for card in one.cards or () if card.context_tokens is not None and card.parent is None]
    for tokens, is_of_prompt in dict.fromkeys((card.context_tokens, card.context_is_of_prompt) for card in cards):
        alike = [
            card.id for card in cards if (card.context_tokens, card.context_is_of_prompt) == (tokens, is_of_prompt)
        ]
        of = "" if len(alike) == len(one.models or ()) else f": {plain(_some(alike))}"
        yield f"{tokens:,} tokens of {'prompt' if is_of_prompt else 'prompt and response'}{of}"


def _kv_cache(one: Inspection) -> Iterator[tuple[str, Text]]:
    """The size of its cache that counts, and whose word that is."""
    load, said = one.shown.metrics, one.said
    if one.endpoint.kv_cache_tokens is not None:
        yield "KV cache", Text(f"{one.endpoint.kv_cache_tokens:,} tokens, by the settings")
    elif load is not None and load.kv_tokens is not None:
        counted = load.counted_tokens
        why = "kv_blocks of block_size_tokens each"
        if load.kv_tokens != counted:
            why = "as its metrics state"
        if counted is not None and load.kv_tokens != counted:
            why += f", and not the {counted:,} of its blocks: a token takes blocks of several sizes there"
        yield "KV cache", Text(f"{load.kv_tokens:,} tokens, {why}")
    elif said is not None and said.tokens is not None:
        yield "KV cache", Text(f"{said.tokens:,} tokens{' at most' if said.is_upper_bound else ''}, as it reports")


def _ranks(one: Inspection) -> Iterator[tuple[str, Text]]:
    """What becomes of its data-parallel ranks."""
    configured, shown = one.endpoint.ranks or one.shown.ranks, one.shown.ranks
    if configured == 1 < shown:
        yield "ranks", Text(f"{shown}, which are one endpoint (ranks: 1): the server distributes the requests itself")
    elif configured == shown > 1:
        yield "ranks", Text(f"{shown}, an endpoint each")
    elif configured > 1 and one.shown.metrics is None:
        yield "ranks", Text(f"{configured} by the settings, an endpoint each")
    elif configured > 1:
        text = f"{configured} by the settings, but its metrics show {shown}: requests for the others may be refused"
        yield "ranks", Text(text, style="yellow")


def _kv_events(endpoint: EndpointSpec, ranks: int) -> Iterator[tuple[str, Text]]:
    """Where its KV events are read. They are not asked for here: an engine publishes only while it computes."""
    events, replay = read_publisher(endpoint.kv_events or ""), read_publisher(endpoint.kv_events_replay or "")
    if events is None:
        return
    ports = f"{events}{f' to port {events.port + ranks - 1}, one for each rank' if ranks > 1 else ''}"
    yield "KV events", Text(f"{ports}; {'lost events are not asked for' if replay is None else f'replay {replay}'}")
    if replay is not None and overlap(events, ranks, replay, ranks):
        text = f"the ports of {ranks} ranks meet those of their replays: leave {ranks} ports to each"
        yield "problem", Text(text, style="red")


def _handover(one: Inspection) -> Iterator[tuple[str, Text]]:
    """Its role and connector, if it has any, and who says so."""
    part = one.part
    role, connector, port = part.handover
    if role is not Role.BOTH or part.role is not None:
        who = "as it reports" if states_role(part.reported) else "by the settings"
        yield "role", Text(f"{role.value} ({who})")
    if connector is None and role is Role.BOTH:
        return
    if connector is None:
        yield "connector", Text("unknown: not configured, and not recognised", style="yellow")
        return
    recognised = part.reported is not None and part.reported.connector == connector
    how = "as it shows" if recognised else "by the settings"
    at = f", bootstrap port {port}" if role is Role.PREFILL and CONNECTORS[connector].concurrent else ""
    yield "connector", Text(f"{connector} ({how}){at}")


def _listed(names: Sequence[str]) -> str:
    return plain(", ".join(names)) or "none"


def _engine(one: Inspection) -> str:
    if one.shown.engine is None:
        unknown = "not detected" if one.endpoint.metrics is not None else "not scraped"
        if one.api is not None:
            return f"{one.api} (by its API)"
        return unknown if one.owner is None else f"{one.owner} (by its models)"
    how = "detected" if one.endpoint.engine == "auto" else "from the settings"
    return f"{one.shown.engine} ({how}{f', metrics at {one.shown.page}' if one.shown.page else ''})"


def _values(one: Inspection) -> str:
    load = one.shown.metrics
    if load is None:
        return ""
    values = [
        f"{name} {getattr(load, name):{',.2f' if name == 'kv_utilization' else ',.0f'}}" for name in one.shown.present
    ]
    lora = load.lora
    if lora is not None:
        busy = _listed(sorted(lora.running | lora.waiting))
        values.append(f"adapters in use: {busy} (room for {lora.max_lora or 'an unknown number'})")
    return f": {', '.join(values)}"
