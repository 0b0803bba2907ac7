# SPDX-License-Identifier: Apache-2.0
"""What the admin API says, drawn: the fleet, the numbers above it, recent requests, one request's explanation.

Every text from outside passes `plain`, so that no server's or client's word can move the cursor. Unknown values are a
dash, as they are null in the API.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lbproxy.commands.client import Fields

MAX_NAME = 24
MAX_ROUTE = 16
ROLES = {"prefill": "P", "decode": "D"}
"""As letters: words would not fit into 80 columns. A tier above 1 stands beside them, as a digit."""
MAX_MODELS = 6
MAX_AILING = 3
HEALTH_STYLES = {
    "up": "green",
    "starting": "cyan",
    "half_open": "yellow",
    "draining": "yellow",
    "ejected": "red",
    "down": "red",
}


def plain(value: object) -> str:
    """Printable characters only."""
    return "".join(char for char in str(value) if char.isprintable())


def summary(state: Fields) -> Text:
    """Two lines: what it is and does, and how that went of late."""
    queue, point = state["queue"], (state.get("history") or [None])[-1]
    up = sum(one["health"] == "up" and not one["draining"] and not _sleep(one) for one in state["endpoints"])
    asleep = sum(bool(_sleep(one)) for one in state["endpoints"])
    text = Text()
    text.append(f"lbproxy {plain(state['version'])}", style="bold")
    text.append(f"  {plain(state['policy'])}  up {_duration(state['uptime_s'])}  ")
    members = sum(not one["leaving"] for one in state["endpoints"])
    text.append(
        f"{up} of {members} endpoints up", style="green" if up + asleep == members else "red" if not up else "yellow"
    )
    if asleep:
        text.append(f"  {asleep} not awake", style="cyan")
    if not (up or asleep or state["stopping"]):
        starting = any(one["health"] == "starting" for one in state["endpoints"])
        text.append("  starting" if starting else "  not ready", style="yellow" if starting else "red")
    if state["stopping"]:
        text.append("  stopping", style="yellow")
    if (exchange := state.get("replicas")) is not None:
        others = len(exchange["others"])
        text.append("" if exchange["connected"] else "  alone", style="red")
        text.append(f"  {others} other {'replica' if others == 1 else 'replicas'}" if exchange["connected"] else "")
    if not state["settings"]["accepted"]:
        text.append("  settings refused", style="red")
    oldest = "" if queue["oldest_s"] is None else f", the oldest for {queue['oldest_s']:.1f} s"
    text.append(
        f"\n{max(0, state['running'] - queue['waiting'])} running, "
    )  # the API's `running` are all that are open
    text.append(f"{queue['waiting']} waiting{oldest}", style="yellow" if queue["waiting"] else "")
    if point is not None:
        first_byte = point["first_byte_ms"]
        text.append(f"  {point['requests'] / point['seconds']:.1f} requests/s")
        text.append(f"  {point['errors']} errors", style="red" if point["errors"] else "dim")
        text.append(f"  {point['rejected']} rejected", style="yellow" if point["rejected"] else "dim")
        known = first_byte["p50"] is not None  # of streams, in the last seconds
        quantiles = f"first byte {_number(first_byte['p50'])} / {_number(first_byte['p95'])} ms"
        text.append(f"  {quantiles if known else 'no streams'}")
    return text


def workers(state: Fields) -> Text | None:
    """A line for each worker process; None: there are none."""
    rows = state.get("workers") or []
    lines = [
        f"worker {one['index']}  pid {one['pid']}  {one['client_connections']} connections  {one['running']} running  "
        f"{100.0 * one['cpu_share']:.0f} % of a core  lag {one['loop_lag_ms']:.0f} ms"
        for one in rows
    ]
    return Text("\n".join(lines), style="dim") if lines else None


def replicas(state: Fields) -> Text | None:
    """A line for each other replica, and one for the store if it cannot be used; None: no replicas are configured."""
    exchange = state.get("replicas")
    if exchange is None:
        return None
    own = f"this is replica {plain(exchange['name'])}, {plain(exchange['url'])}"
    text = Text(own, style="dim")
    if not exchange["connected"]:
        problem = f"\nthe store of the replicas cannot be used, so this one goes on alone: {plain(exchange['problem'])}"
        text.append(problem, style="not dim red")
    for one in exchange["others"]:
        text.append(f"\nreplica {plain(one['name'] or one['id'])}  {plain(one['version'])}  ")
        if one["in_flight"] is None:
            text.append("nothing received yet", style="not dim yellow")
            continue
        text.append(f"{one['in_flight']} in flight  last batch {one['batch_age_s']:.1f} s ago")
        if not one["complete"]:
            text.append("  incomplete", style="not dim yellow")
        if one["missed"]:
            text.append(f"  {one['missed']} gaps")
    return text


def tokens(rows: Sequence[Fields], limit: int) -> Table | None:
    """Who used how many tokens; None: nobody did."""
    if not rows:
        return None
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim", pad_edge=False)
    with_models = any(one["model"] is not None for one in rows)
    with_days = any("day" in one for one in rows)
    for head in (["day"] if with_days else []) + ["flow"] + (["model"] if with_models else []):
        table.add_column(head, no_wrap=True, max_width=MAX_NAME)
    for head in ("prompt", "cached", "completion", "estimated"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in rows[:limit]:
        prompt = one["prompt_uncached"] + one["prompt_cached"]
        named = [plain(one["day"])] if with_days else []
        named += [plain(one["flow"])] + ([plain(one["model"] or "-")] if with_models else [])
        numbers = prompt, one["prompt_cached"], one["completion"], one["estimated"]
        table.add_row(*(Text(_short(name)) for name in named), *(f"{number:,}" for number in numbers))
    if len(rows) > limit:
        table.add_row(Text(f"and {len(rows) - limit} more", style="dim"))
    return table


def offer(state: Fields) -> Text:
    """What clients find and where; of endpoints that take nothing, why. A line each, `MAX_AILING` at most of these."""
    models = dict.fromkeys(name for one in state["endpoints"] for name in one["models"] or ())
    listed = ", ".join(_short(plain(name)) for name in [*models][:MAX_MODELS])
    more = f" and {len(models) - MAX_MODELS} more" if len(models) > MAX_MODELS else ""
    what = f"serves {listed}{more}" if models else "no models known yet"
    text = Text(f"{plain(state['listen'])} {what}" if state.get("listen") else what)
    for line in [need for one in state.get("models") or () if (need := _need(one)) is not None][:MAX_MODELS]:
        text.append(f"\n{line}")
    for one in [one for one in state["endpoints"] if one.get("in_memory") is not None][:MAX_MODELS]:
        text.append(f"\n{plain(one['name'])} has in memory: {_in_memory(one['in_memory'])}")
    ailing = [one for one in state["endpoints"] if one["health"] not in {"up", "starting"} and not one["leaving"]]
    for one in ailing[:MAX_AILING]:
        why = f": {plain(one['reason'])}" if one.get("reason") else ""  # 0.2.0 says it of no endpoint
        text.append(f"\n{plain(one['name'])} is {plain(one['health']).replace('_', ' ')}{why}", style="red")
    if len(ailing) > MAX_AILING:
        text.append(f"\nand {len(ailing) - MAX_AILING} more", style="red")
    return text


def _in_memory(models: Sequence[Fields]) -> str:
    """The models of an endpoint that loads them on demand."""
    words = [f"{plain(one['model'])} ({one['state']} for {_duration(one['for_s'])})" for one in models]
    return ", ".join(words) or "no model"


def _need(model: Fields) -> str | None:
    """What its load needs, if that is known and not what it has."""
    needed, able = model["recommended"], model["endpoints"]
    if not (model.get("recommended_known") and needed) or needed == able:
        return None
    many = "1 endpoint" if needed == 1 else f"{needed} endpoints"
    return f"model {_short(plain(model['model']))}: its load needs {many}; {able or 'none'} can serve it"


def fleet(endpoints: Sequence[Fields], limit: int | None = None) -> Table:
    """One row each, 80 columns wide at most. With a `limit` those first that need a look."""
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim", pad_edge=False)
    with_roles = any(one.get("role") in ROLES or one.get("tier", 1) > 1 for one in endpoints)
    table.add_column("endpoint", no_wrap=True, max_width=MAX_NAME)
    if with_roles:
        table.add_column("", no_wrap=True, min_width=1)
    table.add_column("health", no_wrap=True)
    for head in ("flight", "room", "held", "wait", "run", "kv", "first B", "off", "hit", "queue", "ms/kt", "ms/t"):
        table.add_column(head, justify="right", no_wrap=True)
    shown = list(endpoints)
    if limit is not None and len(shown) > limit:
        shown = sorted(shown, key=lambda one: (one["health"] == "up" and not one["draining"], -one["in_flight"]))
        shown = shown[: max(0, limit - 1)]
    for one in shown:
        table.add_row(*_row(one, with_roles=with_roles))
    if len(shown) < len(endpoints):
        table.add_row(Text(f"and {len(endpoints) - len(shown)} more", style="dim"))
    return table


def _row(one: Fields, *, with_roles: bool) -> Iterator[RenderableType]:
    learned, recent = one["learned"] or {}, one["recent"] or {}
    speed = _known(learned, "prefill_ms_per_token")
    yield Text(_short(plain(one["name"])))
    if with_roles:
        tier = one.get("tier", 1)
        yield Text(ROLES.get(one.get("role") or "", "") + (str(tier) if tier > 1 else ""), style="cyan")
    yield _health(one)
    yield f"{one['in_flight']}+{one['elsewhere']}" if one.get("elsewhere") else str(one["in_flight"])
    yield _room(learned)
    held = learned.get("held")
    yield Text(_number(held), style="yellow" if held else "")
    yield _number(one["waiting"])
    yield _number(one["running"])
    yield _percent(one["kv_utilization"])
    yield _number(recent.get("first_byte_ms"))
    off = recent.get("first_byte_off")
    yield Text("-" if off is None else f"{off:.1f}x", style="yellow" if off and off > 2.0 else "")
    yield _percent(recent.get("hit_ratio"))
    yield _number(learned.get("wait_ms"))
    yield _number(None if speed is None else 1000.0 * speed)
    yield _number(_known(learned, "gap_ms"))


def _known(learned: Fields, name: str) -> Any:
    """A learned value; None while it is only assumed."""
    return learned.get(name) if learned.get("samples", {}).get(name, 1) else None


def _room(learned: Fields) -> Text:
    """What it is full by, or how many requests it runs at once."""
    if learned.get("full_by") is not None:
        return Text(plain(learned["full_by"]), style="yellow")
    limit = learned.get("limit")
    return Text("-" if limit is None else f"of {_number(limit)}")


def _health(one: Fields) -> Text:
    health = plain(one["health"]).replace("_", " ")
    style = HEALTH_STYLES.get(one["health"], "")
    if one["leaving"]:
        return Text("leaving", style="yellow")
    if one["draining"]:
        return Text("drained" if one.get("drained", not one["in_flight"]) else "draining", style="yellow")
    if sleep := _sleep(one):
        left = (one.get("sleep") or {}).get("left_s")
        return Text(sleep if left is None else f"{sleep} {left:.0f} s", style="cyan")
    if one["backing_off"]:
        return Text("backing off", style="yellow")
    lease = "" if one.get("lease_s") is None else f" {one['lease_s']:.0f} s"
    return Text((f"slow start {one['share']:.0%}" if one["share"] < 1.0 else health) + lease, style=style)


def _sleep(one: Fields) -> str:
    """Its phase, if it is not awake and not just down; else empty."""
    phase = (one.get("sleep") or {}).get("state", "awake")
    return "" if phase in {"awake", "unknown"} else plain(phase).replace("_", " ")


LEGEND = (
    "requests/s, errors, rejected, first byte (median / 95th percentile of streams): of the last 5 s · "
    "flight: requests from lbproxy (+ from other replicas) · room: how many it runs at once, or why it is full · "
    "up 24 s: it registered itself, and has to do so again in this time · "
    "held: requests that wait in lbproxy for it · wait, run, kv: as the engine reports · "
    "first B: median ms to first byte · off: how many times as long as predicted that took · "
    "hit: prompt tokens from its cache · queue: ms that a request waits there · "
    "ms/kt: prefill of 1,000 tokens · ms/t: from token to token of a response · P, D: prefill or decode only · "
    "-: unknown, or not learned yet"
)


def decisions(recent: Sequence[Fields]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim", pad_edge=False)
    table.add_column("request", no_wrap=True, max_width=MAX_NAME)
    table.add_column("endpoint", no_wrap=True, max_width=MAX_ROUTE)
    table.add_column("outcome", no_wrap=True, max_width=14)
    for head in ("queue", "first B", "took ms"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in recent:
        good = one["outcome"] == "completed" and (one["status"] or 0) < 400
        table.add_row(
            Text(_short(plain(one["id"]))),
            Text(_route(one)),
            Text(plain(one["outcome"]), style="" if good else "red"),
            _number(one["queue_ms"]),
            _number(one["observed"]["first_byte_ms"] if one.get("stream", True) else None),
            _number(one["duration_ms"]),
        )
    return table


def _route(one: Fields) -> str:
    """Its endpoint; of a split request both, each cut to fit."""
    endpoint, prefill = plain(one["endpoint"] or "-"), one.get("prefill")
    if prefill is None:
        return endpoint
    prefill = plain(prefill)
    if len(prefill) + len(endpoint) < MAX_ROUTE:
        return f"{prefill}>{endpoint}"
    return f"{_short(prefill, 7)}>{_short(endpoint, 8)}"


def transitions(recent: Sequence[Fields]) -> Group:
    """What endpoints became, one line each."""
    lines = []
    for one in recent:
        became = f"{plain(one['endpoint'])} is {plain(one['to']).replace('_', ' ')}"
        line = Text(f"{plain(one['at'])[11:19]} ", style="dim", no_wrap=True, overflow="ellipsis")
        line.append(became, style=HEALTH_STYLES.get(one["to"], ""))
        line.append(f": {plain(one['reason'])}")
        lines.append(line)
    return Group(*lines)


# --- One request ------------------------------------------------------------------------------------------------------


def explanation(found: Fields) -> Group:
    pieces: list[RenderableType] = [_headline(found)]
    if found["waited"] is not None:
        waited = found["waited"]
        best = "" if waited.get("endpoint") is None else f", first for {plain(waited['endpoint'])}"
        pieces.append(Text(f"It waited {found['queue_ms']:,.1f} ms{best}: {plain(waited['meaning'])}."))
    for one in found["failed"]:
        failed = f"An attempt at {plain(one['endpoint'])} failed: {plain(one['failure'])}."
        pieces.append(Text(failed, style="yellow"))
    if found["error"]:
        pieces.append(Text(plain(found["error"]), style="yellow"))
    if found.get("left_out"):
        pieces.append(_not_asked(found["left_out"]))
    number = 0
    for one in found["decisions"]:
        number += not one.get("second_leg")
        pieces += ["", *_decision(one, number)]
    if found["decisions"]:
        pieces += ["", _outcome(found)]
    if lately := _lately(found):
        pieces += [Text(lately)]
    return Group(*pieces)


def _headline(found: Fields) -> Text:
    text = Text(f"{plain(found['id'])}", style="bold")
    text.append(f"  {plain(found['at'])}  {plain(found['method'])} {plain(found['path'])}", style="not bold")
    text.append(f"  model {plain(found['model'] or '-')}", style="not bold")
    if found.get("alias") is not None:  # 0.2.0 does not say it
        text.append(f", asked for as {plain(found['alias'])}", style="not bold")
    if found.get("fallback_from") is not None:
        text.append(f" in place of {plain(found['fallback_from'])}", style="not bold")
    if found.get("flow") not in {None, "anonymous"}:  # core.queue.flow.ANONYMOUS, with which the settings are imported
        text.append(f"  flow {plain(found['flow'])}", style="not bold")
    attempts = found["attempts"]
    where = f"on {plain(found['endpoint'])}" if found["endpoint"] else "on no endpoint"
    if found.get("prefill") is not None:
        took = "" if found["prefill_ms"] is None else f" in {found['prefill_ms']:,.1f} ms"
        where += f" after prefill on {plain(found['prefill'])}{took}"
    tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    if found["running"]:
        ended = "running"
    else:
        ended = f"{plain(found['outcome'])}, status {found['status']}, after {found['duration_ms']:,.1f} ms"
    text.append(f"\n{ended}, {where}, {tries}", style="not bold")
    return text


def _decision(made: Fields, number: int) -> Iterator[RenderableType]:
    count = made["candidates"]
    where = _pair(made)
    if made.get("second_leg"):
        where = f"decode on {where}"
    if made.get("tier", 1) > 1:
        where += f" of tier {made['tier']}"
    yield Text(f"Attempt {number}: {where}, by {plain(made['policy'])}: {plain(made['because'])}.")
    if (compared := _compared(made)) is not None:
        yield compared
    shown = made["shown"]
    if shown:
        table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim", pad_edge=False)
        table.add_column(f"costs in {plain(made['unit'])}" if made.get("unit") else "", no_wrap=True)
        table.add_column("cost", justify="right", no_wrap=True)
        every = dict.fromkeys(name for one in shown for name in one["parts"])  # whole and split requests differ
        names = [name for name in every if any(round(one["parts"].get(name) or 0.0, 1) for one in shown)]
        for name in names:
            assumed = "assumed\n" if name in made.get("assumed", ()) else ""  # nothing was learned of it yet
            table.add_column(assumed + plain(name).replace("_", "\n"), justify="right", no_wrap=True)
        with_cached = any(one.get("cached_tokens") is not None for one in shown)
        if with_cached:
            table.add_column("cached\ntokens", justify="right", no_wrap=True)
        for one in shown:
            style = "bold green" if one["chosen"] else ""
            parts = [_tenth(one["parts"].get(name)) for name in names]
            parts += [_number(one.get("cached_tokens"))] if with_cached else []
            table.add_row(Text(_pair(one)), _tenth(one["cost"]), *parts, style=style)
        yield table
    if count > len(shown) > 0:
        yield Text(f"and {count - len(shown)} more, with the same or higher costs", style="dim")
    if made["left_out"]:
        yield _not_asked(made["left_out"])


def _not_asked(left_out: Sequence[Fields]) -> Text:
    listed = ", ".join(f"{plain(one['endpoint'])} ({plain(one['why']).replace('_', ' ')})" for one in left_out)
    return Text(f"not asked: {listed}", style="dim")


def _pair(one: Fields) -> str:
    """A candidate, or what was chosen: an endpoint, or two of which the first computes the prompt."""
    name, second = _short(plain(one["endpoint"])), one.get("decode_on")
    return name if second is None else f"{name} > {_short(plain(second))}"


def _compared(made: Fields) -> Text | None:
    """What split and whole requests would cost, where it could be either."""
    lowest = made.get("lowest_costs") or {}
    whole, split = lowest.get("whole"), lowest.get("split")
    if whole is None or split is None:
        return None
    unit = f" {plain(made['unit'])}" if made.get("unit") else ""
    return Text(f"The best pair costs {_tenth(split)}{unit}, the best single endpoint {_tenth(whole)}{unit}.")


def _outcome(found: Fields) -> Table:
    predicted, observed = found["predicted"], found["observed"]
    table = Table(box=None, padding=(0, 0, 0, 1), header_style="dim", pad_edge=False)
    table.add_column("")
    table.add_column("predicted", justify="right")
    table.add_column("observed", justify="right")
    seen = observed["first_byte_ms"] if found["stream"] else None  # else that is the end of the response
    table.add_row("first byte, ms", _tenth(predicted["first_byte_ms"]), _tenth(seen))
    of = "" if observed["prompt_tokens"] is None else f" of {observed['prompt_tokens']:,}"
    cached = "-" if observed["cached_tokens"] is None else f"{observed['cached_tokens']:,}"
    table.add_row(f"cached prompt tokens{of}", _number(predicted["cached_tokens"]), cached)
    return table


def _lately(found: Fields) -> str:
    """How right the predictions for its endpoint have been; empty if nothing was predicted."""
    lately = found.get("lately") or {}
    off, cached, predicted = (lately.get(name) for name in ("first_byte_off", "hit_ratio", "predicted_hit_ratio"))
    said = [] if off is None else [f"first bytes took {off:.1f} times as long as predicted"]
    if cached is not None and predicted is not None:
        said.append(f"{cached:.0%} of the prompts was cached, {predicted:.0%} predicted")
    return f"Lately at {plain(found['endpoint'])}: {'; '.join(said)}." if said else ""


def _short(text: str, limit: int = MAX_NAME) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _tenth(value: Any) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(value: Any) -> str:
    return "-" if value is None else f"{100.0 * value:.0f}%"


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days"
