# SPDX-License-Identifier: Apache-2.0
"""`lbproxy register`: beside a model server, tells running lbproxies again and again that it is there.

Each admin listener has a thread of its own, so that one that hangs delays no other. What is asked when, and what of it
is said, is `Renewals`'s, which knows no clock. Whatever fails is tried again, for as long as this runs: an lbproxy that
restarts knows the endpoint again after at most `--every`. At its end it has the endpoint removed: what runs there
finishes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from lbproxy.commands.client import TIMEOUT_S, AdminClient, AdminError
from lbproxy.commands.tables import plain
from lbproxy.config.text import ConfigError, read_text

TTLS: Final = 3.0
"""How many renewals may be lost: what is removed comes back with the next one."""
AGAIN_S: Final = 1.0
"""After the first failure; twice as long after each further one, up to `--every`."""
SPREAD: Final = 0.9
"""Each wait is this much of itself to all of it: what began together does not ask together for ever."""
MAX_ADMINS: Final = 16
Say = Callable[[str], None]


class Step(NamedTuple):
    """What follows a try."""

    wait_s: float
    """Until the next one."""
    say: str | None
    """None: nothing that was not said before."""


class Renewals:
    """What was told one lbproxy. Pure."""

    def __init__(self, url: str, every_s: float, rng: random.Random) -> None:
        self.name: str | None = None
        """The endpoint's name there; None: it is not known to be there."""
        self._url, self._every_s, self._rng = url, every_s, rng
        self._failures = 0
        self._said = ""

    def succeeded(self, name: str) -> Step:
        """It is registered by this name."""
        self._failures = 0
        text = f"{self._url}: registered {plain(name)}, renewed every {self._every_s:g} s"
        self.name = name
        return Step(self._every_s * self._rng.uniform(SPREAD, 1.0), self._if_new(text))

    def failed(self, problem: str) -> Step:
        """It is not, or not known to be; it is tried again."""
        wait_s = min(self._every_s, AGAIN_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        where = "" if problem.startswith(self._url) else f"{self._url}: "
        return Step(wait_s * self._rng.uniform(SPREAD, 1.0), self._if_new(f"{where}{problem}; trying again"))

    def _if_new(self, text: str) -> str | None:
        if text == self._said:
            return None
        self._said = text
        return text


def read_entry(text: str) -> dict[str, object]:
    """The endpoint that is meant: a URL, or a mapping in YAML as in `endpoints`. Raises ConfigError."""
    value = read_text(text, environ=os.environ, source="ENDPOINT")
    if value.problems:
        raise ConfigError("ENDPOINT", [f"{path}: {wrong}" for path, wrong in value.problems.items()])
    entry = {"url": value.values} if isinstance(value.values, str) else value.values
    if not isinstance(entry, Mapping) or not isinstance(entry.get("url"), str):
        raise ConfigError("ENDPOINT", ["expected a URL, or a mapping with `url` as in `endpoints`"])
    return dict(entry)


def register(entry: Mapping[str, object], urls: Sequence[str], token: str | None, *, every_s: float, say: Say) -> int:
    """Until a signal; returns 0, or 1 if it could not be removed everywhere at the end."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    left: list[str] = []

    def keep(url: str) -> None:
        if not _keep(url, token, entry, every_s, stop, say):
            left.append(url)

    threads = [threading.Thread(target=keep, args=(url,)) for url in dict.fromkeys(urls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if left else 0


def _keep(
    url: str, token: str | None, entry: Mapping[str, object], every_s: float, stop: threading.Event, say: Say
) -> bool:
    """Have one lbproxy know the endpoint until `stop` is set. Returns whether it does not any more."""
    renewals = Renewals(url, every_s, random.Random())  # noqa: S311 - it spreads requests
    body, within_s = {**entry, "ttl": TTLS * every_s}, min(TIMEOUT_S, 2.0 * every_s)
    client: AdminClient | None = None
    while not stop.is_set():
        try:
            client = client or AdminClient(url, token)
            step = renewals.succeeded(client.post("endpoints", within_s=within_s, body=body)["name"])
        except AdminError as error:
            step = renewals.failed(str(error))
            if client is not None:  # its token may be another one now
                client.close()
            client = None
        if step.say is not None:
            say(step.say)
        stop.wait(step.wait_s)
    return renewals.name is None or _remove(url, token, renewals.name, str(entry["url"]), say)


def _remove(url: str, token: str | None, name: str, own: str, say: Say) -> bool:
    """Have an endpoint removed, if it is still this one, with its `own` URL."""
    try:
        client = AdminClient(url, token)
        client.delete("endpoints", name, url=own)
        client.close()
    except AdminError as error:
        is_gone = error.status in {404, 409}
        ends = "is not this one any more" if is_gone else "cannot be removed, so it stays until its lease ends"
        say(f"{url}: {plain(name)} {ends}: {error}")
        return is_gone
    say(f"{url}: removed {plain(name)}; what runs there finishes")
    return True
