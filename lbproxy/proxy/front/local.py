# SPDX-License-Identifier: Apache-2.0
"""Which requests are served where nobody needs a key because only this machine connects: those that no web page from
elsewhere makes its browser send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lbproxy.config.sections.cors import ANY_ORIGIN
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.net.listening.sites import is_cross_origin, is_loopback_name, name_of

MAX_KNOWN: Final = 256
"""Pairs of host and origin that are remembered: a handful of programs, or who tries many."""
_WRONG_HOST: Final = (
    "Without API keys, this address of lbproxy serves requests for localhost and loopback addresses only, and the Host "
    "of this one is another name. If it is lbproxy's, add it to listen.allowed_hosts."
)
_WRONG_ORIGIN: Final = (
    "Without API keys, this address of lbproxy refuses requests of web pages of other origins. If this page may use "
    "it, add its origin to cors.origins."
)


class LocalRequests:
    """The rule, under one set of settings. A request that is like one before costs a look-up."""

    def __init__(self) -> None:
        self.applies = False
        """Only this machine connects."""
        self.reconfigure((), ())

    def reconfigure(self, hosts: Sequence[str], origins: Sequence[str]) -> None:
        """`hosts`: names besides localhost, in lower case; `origins`: those of pages from elsewhere that are let in."""
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origins)
        self._known: set[tuple[bytes, str | None]] = set()

    def require(self, host: bytes, origin: str | None) -> None:
        """Raise LbError FORBIDDEN unless the sender may be served. `host`: empty if there is none."""
        known = (host, origin)
        if known in self._known:
            return
        text = host.decode("latin-1")
        name = name_of(text)
        if name and name not in self._hosts and not is_loopback_name(name):
            raise LbError(Outcome.FORBIDDEN, _WRONG_HOST)
        if origin is not None and is_cross_origin(origin, text) and not self._origins & {origin, ANY_ORIGIN}:
            raise LbError(Outcome.FORBIDDEN, _WRONG_ORIGIN)
        if len(self._known) < MAX_KNOWN:
            self._known.add(known)
