"""What systemd is told: that we serve, reload, stop, hand over, and that our event loop turns (sd_notify(3)).

Sent as datagrams to the socket that `NOTIFY_SOCKET` names; without one nothing is sent. Invariants: telling never
raises and never waits, for nothing that we do hangs on it; the variables stay in the environment, because a successor
of ours (net/listening/inherit.py) is to tell the same systemd.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

BEATS_IN_TIME = 3
"""Signs of life within the time after which systemd thinks us dead: one may come late."""


class Notifier:
    """Tells whoever started us. Owned by the composition root."""

    def __init__(self, address: str | None, *, watchdog_s: float | None = None) -> None:
        """`address`: a path, or a name that begins with @ for one that stands in no directory; None = nobody asked."""
        self._address = address
        self._beat_s = None if watchdog_s is None else watchdog_s / BEATS_IN_TIME
        self._beaten_at = 0.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Notifier:
        """As systemd sets it. What is no address, or no time, counts as not said."""
        address = environ.get("NOTIFY_SOCKET", "")
        usec = environ.get("WATCHDOG_USEC", "")
        watchdog_s = int(usec) / 1e6 if usec.isdecimal() and int(usec) > 0 else None
        return cls(address if address[:1] in {"/", "@"} else None, watchdog_s=watchdog_s)

    def ready(self, status: str) -> None:
        """We serve, for the first time or after a reload. `status`: one line for `systemctl status`."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """Until `ready`."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(time.monotonic() * 1e6)}")

    def stopping(self, status: str) -> None:
        """We take no more requests."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def succeeded_by(self, pid: int) -> None:
        """Another process is the service now, and tells the rest: we say no more."""
        self._send(f"MAINPID={pid}")
        self._address = None

    def beat(self, _: float = 0.0) -> None:
        """Our loop turns. Costs nothing where no watchdog listens; to be called at every tick of the pulse."""
        if self._beat_s is not None and (now := time.monotonic()) - self._beaten_at >= self._beat_s:
            self._beaten_at = now
            self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if self._address is None:
            return
        name = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        # It is gone, or too busy to listen; and we tell too seldom to keep a socket.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(os.fsencode(state), name)
