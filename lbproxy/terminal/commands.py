"""`lbproxy status`, `drain`, `undrain` and `explain`. Each returns the exit code; AdminError is for the caller."""

from __future__ import annotations

import json
import time

from rich.console import Console

from lbproxy.terminal.client import AdminClient
from lbproxy.terminal.tables import LEGEND, explanation, fleet, offer, plain, replicas, summary, workers

POLL_S = 0.25


def status(client: AdminClient, console: Console, *, as_json: bool) -> int:
    """The fleet, once, and what is there to know of it before any request came."""
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
    console.print(LEGEND, style="dim")
    return 0


def explain(client: AdminClient, console: Console, request_id: str, *, as_json: bool) -> int:
    """Why one request went where it went."""
    found = client.get("decisions", request_id)
    if as_json:
        console.print_json(json.dumps(found))
    else:
        console.print(explanation(found))
    return 0


def drain(client: AdminClient, console: Console, name: str, *, wait: bool, timeout_s: float | None) -> int:
    """Give an endpoint no new requests. With `wait` until it has none; 1 if the time is up before that."""
    progress = client.post("endpoints", name, "drain")
    shown = plain(name)
    began_at, said = time.monotonic(), None
    while True:
        left = progress["in_flight"]
        if left != said:
            so_far = "drained" if not left else f"draining: {left} {'request' if left == 1 else 'requests'} left"
            console.print(f"{shown} is {so_far}", markup=False)
            said = left
        if not left or not wait:
            return 0
        if timeout_s is not None and time.monotonic() - began_at >= timeout_s:
            console.print(f"{shown} has {left} running requests after {timeout_s:g} s", style="red", markup=False)
            return 1
        time.sleep(POLL_S)
        progress = client.get("endpoints", name)


def set_awake(client: AdminClient, console: Console, name: str, *, awake: bool) -> int:
    """Have an endpoint woken, or put to sleep: asked for, not waited for."""
    client.post("endpoints", name, "wake" if awake else "sleep")
    console.print(f"{plain(name)} {'is woken' if awake else 'is put to sleep when it has no requests'}", markup=False)
    return 0


def undrain(client: AdminClient, console: Console, name: str) -> int:
    """Give it requests again."""
    client.post("endpoints", name, "undrain")
    console.print(f"{plain(name)} takes requests again", markup=False)
    return 0
