# SPDX-License-Identifier: Apache-2.0
"""Messages to systemd: that lbproxy serves, reloads, stops, hands over, and that its event loop runs (sd_notify(3)).

Sent as datagrams to the socket in `NOTIFY_SOCKET`; without that nothing is sent. Invariants: sending never raises and
never waits, for nothing depends on it; the variables stay in the environment, because a successor
(net/listening/inherit.py) reports to the same systemd.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

BEATS_IN_TIME = 3
"""Messages within the time after which systemd assumes a hang: one of them may be late."""


class Notifier:
    """Reports to the service manager. Owned by the composition root."""

    def __init__(self, address: str | None, *, watchdog_s: float | None = None) -> None:
        """`address`: a path, or a name with @ for an abstract socket; None = not requested."""
        self._address = address
        self._beat_s = None if watchdog_s is None else watchdog_s / BEATS_IN_TIME
        self._beaten_at = float("-inf")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Notifier:
        """As systemd sets it. An invalid address or time counts as missing."""
        address = environ.get("NOTIFY_SOCKET", "")
        usec = environ.get("WATCHDOG_USEC", "")
        watchdog_s = int(usec) / 1e6 if usec.isdecimal() and int(usec) > 0 else None
        return cls(address if address[:1] in {"/", "@"} else None, watchdog_s=watchdog_s)

    def ready(self, status: str) -> None:
        """lbproxy serves, for the first time or after a reload. `status`: one line for `systemctl status`."""
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self) -> None:
        """A reload is in progress until `ready`."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(time.monotonic() * 1e6)}")

    def stopping(self, status: str) -> None:
        """lbproxy takes no more requests."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    def succeeded_by(self, pid: int) -> None:
        """Another process is the service now, and sends the next messages: this one sends no more."""
        self._send(f"MAINPID={pid}")
        self._address = None

    def beat(self, _: float = 0.0) -> None:
        """The event loop runs. Costs nothing without a watchdog; call it at every tick of the pulse."""
        if self._beat_s is not None and (now := time.monotonic()) - self._beaten_at >= self._beat_s:
            self._beaten_at = now
            self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if self._address is None:
            return
        name = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        # systemd is gone or busy; and messages are too rare to keep a socket
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(os.fsencode(state), name)
