# SPDX-License-Identifier: Apache-2.0
"""`lbproxy status`, `drain`, `explain` and their like. Each returns the exit code; AdminError is for the caller."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lbproxy.commands.client import AdminClient, AdminError, Fields
from lbproxy.commands.tables import (
    LEGEND,
    decisions,
    explanation,
    fleet,
    offer,
    plain,
    replicas,
    summary,
    tokens,
    transitions,
    workers,
)
from lbproxy.control.admin.made_token import dashboard_link

POLL_S = 0.25
RELOAD_S = 60.0
"""For reading the settings and resolving what they name, in all processes."""
_NONE_NEEDED = "it listens on a Unix socket, which needs none, or found no folder for one (as its log says)"
AGAIN_S = 1.0
MAX_FLOWS = 10
MAX_TRANSITIONS = 3
MIN_DECISIONS = 3
OWN_LINES = 6
"""Summary, heads of tables and the lines between them."""


def status(client: AdminClient, console: Console, *, as_json: bool, legend: bool = False) -> int:
    """The fleet, once, and what is there to know of it before any request came. `legend`: what its columns mean."""
    state = client.get("state")
    if as_json:
        console.print_json(json.dumps(state))
        return 0
    history = client.get("history")["points"]
    console.print(summary(state | {"history": history}))
    console.print(offer(state))
    for lines in (workers(state), replicas(state)):
        if lines is not None:
            console.print(lines)
    console.print(fleet(state["endpoints"]))
    if (used := tokens(state.get("flows") or [], MAX_FLOWS)) is not None:
        console.print(Text("\ntokens since the start, by flow", style="dim"), used, sep="\n")
    console.print(LEGEND if legend else "`lbproxy status --legend` says what the columns mean", style="dim")
    return 0


def explain(client: AdminClient, console: Console, request_id: str | None, *, as_json: bool) -> int:
    """Why one request went where it went; None: the last that ended."""
    if request_id is None:
        ended = client.get("decisions")["decisions"]
        if not ended:
            raise AdminError("no request has ended yet, or none is remembered (`explain.requests`)")
        request_id = ended[0]["engine_id"]
    found = client.get("decisions", str(request_id))
    if as_json:
        console.print_json(json.dumps(found))
    else:
        console.print(explanation(found))
    return 0


def drain(
    client: AdminClient,
    console: Console,
    name: str,
    *,
    wait_s: float | None,
    force: bool,
    move_after_s: float | None = None,
) -> int:
    """Give an endpoint no new requests, and wait for so long until it has none; after `move_after_s` its streams go on
    elsewhere, if they can. 1 if the time is up before that, and, unless `force`, if nothing else takes requests for one
    of its models: it is not drained then.
    """
    shown = plain(name)
    if models := only_there(client.get("endpoints")["endpoints"], name):
        named = ", ".join(map(plain, models))
        if not force:
            text = f"{shown} is not drained: no other endpoint takes requests for {named} (--force drains it anyway)"
            console.print(text, style="red", markup=False)
            return 1
        text = f"no endpoint takes requests for {named} now: they get 503 until one does"
        console.print(text, style="yellow", markup=False)
    path = "endpoints", name, "drain"
    progress = client.post(*path) if move_after_s is None else client.post(*path, move_after=ceil(move_after_s))
    began_at, said = time.monotonic(), None
    while True:
        left = progress["in_flight"]
        drained = progress.get("drained", not left)  # 0.2.0 does not say it of an endpoint
        if (left, drained) != said:
            unheard = "not all worker processes have said yet what runs there"
            so_far = "drained" if drained else f"draining: {_running(left) + ' left' if left else unheard}"
            console.print(f"{shown} is {so_far}", markup=False)
            said = left, drained
        if drained or wait_s is None:
            return 0
        if time.monotonic() - began_at >= wait_s:
            text = f"{shown} still has {_running(left)} after {wait_s:g} s; it stays drained, and gets no new ones"
            console.print(text, style="red", markup=False)
            return 1
        time.sleep(POLL_S)
        progress = client.get("endpoints", name)


def _running(requests: int) -> str:
    return f"{requests} {'request' if requests == 1 else 'requests'}"


def only_there(endpoints: Sequence[Fields], name: str) -> list[str]:
    """The models of an endpoint, or of a server's ranks, that no other takes requests for, or can be woken for."""
    takes = [one for one in endpoints if not (one["draining"] or one["leaving"]) and _may_serve(one)]
    there = [one for one in takes if name in {one["name"], one["name"].rpartition("#")[0]}]
    others = [one for one in takes if one not in there]
    if any(one["models"] is None for one in others):  # it may serve any
        return []
    served = {model for one in others for model in one["models"]}
    return [model for model in dict.fromkeys(_models(there)) if model not in served]


def _models(endpoints: Sequence[Fields]) -> Iterator[str]:
    for one in endpoints:
        yield from one["models"] or ()


def _may_serve(one: Fields) -> bool:
    asleep = (one.get("sleep") or {}).get("state", "awake") not in {"awake", "unknown"}
    return one["health"] in {"up", "half_open"} or one["readmitted"] or asleep


def set_awake(client: AdminClient, console: Console, name: str, *, awake: bool) -> int:
    """Have an endpoint woken, or put to sleep: asked for, not waited for."""
    client.post("endpoints", name, "wake" if awake else "sleep")
    console.print(f"{plain(name)} {'is woken' if awake else 'is put to sleep when it has no requests'}", markup=False)
    return 0


def undrain(client: AdminClient, console: Console, name: str) -> int:
    client.post("endpoints", name, "undrain")
    console.print(f"{plain(name)} takes requests again", markup=False)
    return 0


def reload(client: AdminClient, console: Console) -> int:
    """Have the settings read again, wait until they are in force, and say what is other than before."""
    result = client.post("reload", within_s=RELOAD_S)
    changed = result.get("changed", [])
    console.print("the settings are reloaded:" if changed else "the settings are reloaded: nothing changed")
    for line in changed:
        console.print(f"  {plain(line)}", markup=False)
    if result.get("at_next_start"):
        text = f"only a restart changes {', '.join(result['at_next_start'])}"
        console.print(text, style="yellow", markup=False)
    return 0


def names(client: AdminClient, *, of_requests: bool) -> int:
    """Print what can be completed, one a line: ids of the requests that ended last, or names of endpoints."""
    if of_requests:
        found = [str(one["engine_id"]) for one in client.get("decisions")["decisions"]]
    else:
        found = [str(one["name"]) for one in client.get("endpoints")["endpoints"]]
    sys.stdout.write("".join(f"{plain(one)}\n" for one in found))
    return 0


def admin_token(client: AdminClient) -> int:
    """Print what `curl` needs for a change, and nothing else."""
    token = client.token()
    if token is None:
        raise AdminError(f"{client.url} has no token of its own: {_NONE_NEEDED}")
    sys.stdout.write(f"{token}\n")
    return 0


def dashboard(client: AdminClient) -> int:
    """Print where the dashboard is, with the token for its buttons if there is one."""
    if client.url.startswith("unix:"):
        raise AdminError("a browser cannot open a Unix socket: give `admin` a port, or forward one to it")
    token = client.token()
    sys.stdout.write(dashboard_link(client.url.rstrip("/"), token) + "\n")
    if token is None:
        sys.stderr.write(f"its buttons change nothing: {_NONE_NEEDED}\n")
    return 0


def top(client: AdminClient, console: Console, *, frames: int | None = None) -> int:
    """`lbproxy top`: the fleet, live, in a terminal of 80 columns and 24 lines or more. `q` or Ctrl-C ends it.

    It lives on the admin API's events. When they break off it says so, keeps the last picture, and asks again each
    second, so that it survives a restart of lbproxy.

    Until somebody ends it, or after so many frames; once, if nobody sees it live. Raises AdminError if there is nobody
    at the start.
    """
    if frames is None and not console.is_terminal:
        frames = 1
    state = client.get("state") | {"history": client.get("history")["points"], "decisions": []}
    screen = Live(console=console, screen=console.is_terminal, auto_refresh=False)
    with _quits_on_q(), screen as live, contextlib.suppress(KeyboardInterrupt):
        _follow(client, partial(live.update, refresh=True), console, state, frames)
    return 0


def _follow(
    client: AdminClient, show: Callable[[RenderableType], None], console: Console, first: Fields, frames: int | None
) -> None:
    last, seen = first, 0
    while True:
        lost = "the connection ended"
        try:
            for last in client.events():
                show(picture(last, height=console.height))
                seen += 1
                if frames is not None and seen >= frames:
                    return
        except AdminError as error:
            lost = str(error).partition("\n")[0]
        show(picture(last, height=console.height, lost=lost))
        time.sleep(AGAIN_S)


def picture(state: Fields, *, height: int, lost: str | None = None) -> Group:
    """What fits in so many lines: the fleet first, then recent requests, then what endpoints became."""
    became = state["transitions"][:MAX_TRANSITIONS]
    room = max(4, height - OWN_LINES - len(became) - (MIN_DECISIONS if state["decisions"] else 0))
    endpoints = state["endpoints"]
    rows = min(len(endpoints), room)
    left = max(0, height - OWN_LINES - len(became) - rows)
    pieces: list[RenderableType] = [summary(state), fleet(endpoints, limit=room), Text()]
    if state["decisions"]:
        pieces += [decisions(state["decisions"][: max(0, left)])]
    pieces.append(transitions(became))
    if lost is not None:
        pieces[0] = Text(f"{lost}; reconnecting", style="red", no_wrap=True, overflow="ellipsis")
    return Group(*pieces)


@contextlib.contextmanager
def _quits_on_q() -> Iterator[None]:
    """While it lasts, `q` is as good as Ctrl-C, if there is a keyboard."""
    try:
        import termios  # noqa: PLC0415 - not on every platform
        import tty  # noqa: PLC0415
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    # A script that starts it in the background has the signal ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    tty.setcbreak(descriptor)
    threading.Thread(target=_watch_keys, args=(descriptor,), daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGINT, handler)


def _watch_keys(descriptor: int) -> None:
    while (key := os.read(descriptor, 1)) not in (b"q", b""):
        del key
    os.kill(os.getpid(), signal.SIGINT)
