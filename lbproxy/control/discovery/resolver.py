# SPDX-License-Identifier: Apache-2.0
"""Asks which addresses a name has: the hosts file, and DNS by way of `nameservers`.

It says what was answered; what of it to believe is discovery's. Invariants:

- Nothing here runs on the event loop: a thread of its own has its own loop. To parse an answer of 1,000 addresses takes
  30 ms of pure Python, which streams must not wait for.
- A lookup ends within the settings' time-out, whatever the nameservers do, and never raises.
- With nameservers in the settings, they alone are asked, and for the name exactly as it is written. Without, it goes as
  it does for other programs of this machine: the hosts file first; else resolv.conf's nameservers, search list and
  ndots. Both files are read anew for each lookup, so that a change needs no restart. Other sources of the C library
  (mDNS, LDAP) are not asked: its getaddrinfo cannot be cancelled, nor told which nameservers to use.
"""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, TypeVar

from lbproxy.config.sections.endpoints import DnsSettings
from lbproxy.control.discovery.dns_answers import (
    EMPTY,
    MAX_SERVERS,
    OK,
    DnsAnswer,
    Lookup,
    NoRecordsError,
    Services,
    SrvRecord,
    answer,
)

if TYPE_CHECKING:
    from lbproxy.control.discovery.nameservers import Nameservers

JOIN_S = 2.0
T = TypeVar("T")


class Resolver:
    """Looks names up in a thread, which the first lookup starts and `close` ends. Belongs to one event loop."""

    def __init__(self, settings: DnsSettings, read_hosts: Callable[[], str]) -> None:
        """`read_hosts` returns the text of the hosts file; called in the thread."""
        self._settings = settings
        self._read_hosts = read_hosts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def lookup(self, host: str) -> Lookup:
        """The addresses of `host`. Any number may run at the same time; cancelling ends it."""
        return await self._in_thread(self._lookup(host))

    async def services(self, name: str) -> Services:
        return await self._in_thread(self._services(name))

    async def _in_thread(self, question: Coroutine[object, object, T]) -> T:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="lbproxy-dns", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, self._loop))

    def close(self) -> None:
        """End the thread, and what still runs in it."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S)
            self._loop = self._thread = None

    async def _lookup(self, host: str) -> Lookup:
        if self._settings.nameservers is None:
            listed = list(addresses_in(self._read_hosts(), host.rstrip(".")))
            if listed:
                return Lookup(answer(one for one in listed if ":" not in one), answer(a for a in listed if ":" in a))
        try:
            nameservers = self._nameservers()
        except NoRecordsError as failure:
            failed = DnsAnswer(failure.result, detail=failure.detail)
            return Lookup(failed, failed)
        v4, v6 = await asyncio.gather(*(self._ask(nameservers, host, kind) for kind in ("A", "AAAA")))
        return Lookup(v4, v6)

    def _nameservers(self) -> Nameservers:
        """Raises NoRecordsError. Imported here, in the thread: without names nothing waits for dnspython."""
        from lbproxy.control.discovery.nameservers import Nameservers  # noqa: PLC0415

        return Nameservers(self._settings)

    async def _services(self, name: str) -> Services:
        try:
            found = await self._nameservers().records(name, "SRV")
        except NoRecordsError as failure:
            return Services(failure.result, detail=failure.detail)
        read = {SrvRecord(one.priority, one.weight, one.port, one.target.to_text(True).lower()) for one in found}
        if all(one.target == "." for one in read):  # "the service is decidedly not available at this domain"
            return Services(EMPTY, detail="the name has no SRV records")
        return Services(OK, tuple(sorted(one for one in read if one.target != ".")[:MAX_SERVERS]))

    async def _ask(self, nameservers: Nameservers, host: str, kind: str) -> DnsAnswer:
        try:
            return answer(record.address for record in await nameservers.records(host, kind))
        except NoRecordsError as failure:
            return DnsAnswer(failure.result, detail=failure.detail)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """The thread."""
    loop.run_forever()
    loop.run_until_complete(_end())
    loop.close()


async def _end() -> None:
    """Cancel what still runs on this loop."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def addresses_in(hosts: str, host: str) -> Iterator[str]:
    """The addresses that the text of a hosts file (man 5 hosts) has for a name, which is in lower case."""
    if host not in hosts.lower():  # files that block advertisements have 100,000 lines
        return
    for line in hosts.lower().splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if host in names:
            try:
                yield str(ipaddress.ip_address(address))
            except ValueError:
                continue
