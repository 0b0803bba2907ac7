# SPDX-License-Identifier: Apache-2.0
"""Asks nameservers. The only module that knows a DNS library (dnspython); all of it runs in the resolver's thread."""

from __future__ import annotations

import asyncio

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver

from lbproxy.config.sections.endpoints import DnsSettings
from lbproxy.control.discovery.dns_answers import FAILED, NXDOMAIN, TIMEOUT, NoRecordsError

TRIES = 2
"""Questions to each nameserver within the time-out: one UDP packet may get lost."""
MARGIN_S = 0.5
"""The library's time-out goes by the wall clock, which may jump; this much later the event loop's clock ends it."""


class Nameservers:
    """Those of the settings, or else resolv.conf's. To make one costs 0.1 ms; it has no cache: nameservers keep one."""

    def __init__(self, settings: DnsSettings) -> None:
        """Raises NoRecordsError if resolv.conf is not there, or bad."""
        self._timeout_s = settings.timeout
        try:
            self._resolver = _resolver(settings)
        except (dns.exception.DNSException, OSError, ValueError) as error:
            raise NoRecordsError(FAILED, error) from None

    async def records(self, name: str, kind: str) -> dns.resolver.Answer:
        """The records of one kind, maybe none. Raises NoRecordsError."""
        try:
            async with asyncio.timeout(self._timeout_s + MARGIN_S):
                return await self._resolver.resolve(name, kind, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN as error:
            raise NoRecordsError(NXDOMAIN, error) from None
        except (dns.exception.Timeout, TimeoutError) as error:
            raise NoRecordsError(TIMEOUT, error) from None
        except (dns.exception.DNSException, OSError, ValueError) as error:  # refused, SERVFAIL, a loop, too long a name
            raise NoRecordsError(FAILED, error) from None


def _resolver(settings: DnsSettings) -> dns.asyncresolver.Resolver:
    addresses = settings.nameservers
    resolver = dns.asyncresolver.Resolver(configure=addresses is None)
    if addresses is not None:
        resolver.nameservers = [_nameserver(one) for one in addresses]
    resolver.use_search_by_default = addresses is None
    resolver.timeout = settings.timeout / (TRIES * len(resolver.nameservers))
    resolver.lifetime = settings.timeout
    return resolver


def _nameserver(address: str) -> dns.nameserver.Nameserver:
    """From the settings' `ip:port`."""
    host, _, port = address.rpartition(":")
    return dns.nameserver.Do53Nameserver(host.strip("[]"), int(port))
