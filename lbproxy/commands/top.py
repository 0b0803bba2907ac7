# SPDX-License-Identifier: Apache-2.0
"""`lbproxy top`: the fleet, live, in a terminal of 80 columns and 24 lines or more. `q` or Ctrl-C ends it.

It lives on the admin API's events. When they break off it says so, keeps the last picture, and asks again each second,
so that it survives a restart of lbproxy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from lbproxy.commands.client import AdminClient, AdminError, Fields
from lbproxy.commands.tables import decisions, fleet, summary, transitions

AGAIN_S = 1.0
MAX_TRANSITIONS = 3
MIN_DECISIONS = 3
OWN_LINES = 6
"""Summary, heads of tables and the lines between them."""


def top(client: AdminClient, console: Console, *, frames: int | None = None) -> int:
    """Until somebody ends it, or after so many frames; once, if nobody sees it live. Raises AdminError if there is
    nobody at the start.
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
