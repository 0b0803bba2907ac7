# SPDX-License-Identifier: Apache-2.0
"""The look for a model that no endpoint listed: all are asked, once for all requests that name such models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Final, Generic, Protocol, TypeVar

from lbproxy.core.endpoints.endpoint import EndpointUid

LOOK_S: Final = 2.0
"""What a request waits at most for endpoints to say whether they have its model."""
LOOK_AGAIN_S: Final = 5.0
"""The least time between two looks, whichever models are asked for."""


class ModelReader(Protocol):
    """Asks one endpoint for its models, and reports them."""

    async def refresh_models(self) -> None:
        """Now. Bounded in time; raises nothing."""

    def doubt_models(self) -> None:
        """Soon."""


class ModelLook:
    """Many random names cost no more than one: a look ends after `LOOK_S`, and none begins for `LOOK_AGAIN_S`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        self._loop = loop
        self._now = now
        self._began_at = -inf
        self._end: asyncio.TimerHandle | None = None
        """None: no look is under way."""
        self._unheard: set[EndpointUid] = set()
        """The endpoints that did not say yet."""
        self._looked: list[Callable[[], None]] = []

    @property
    def may_begin(self) -> bool:
        """Whether there is none, and the last one is long ago."""
        return self._end is None and self._now() >= self._began_at + LOOK_AGAIN_S

    def begin(self, asked: Iterable[EndpointUid]) -> None:
        """These endpoints are asked now; at least one."""
        self._unheard = {*asked}
        self._began_at = self._now()
        self._end = self._loop.call_later(LOOK_S, self.end)

    def join(self, looked: Callable[[], None]) -> bool:
        """Call `looked` when the look is over. Returns False if there is none."""
        if self._end is None:
            return False
        self._looked.append(looked)
        return True

    def heard(self, uids: Iterable[EndpointUid]) -> None:
        """These said what they serve, or cannot say."""
        self._unheard.difference_update(uids)
        if self._end is not None and not self._unheard:
            self.end()

    def end(self) -> None:
        """All said what they serve, or the time is over."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        looked, self._looked = self._looked, []
        for call in looked:
            call()


Of = TypeVar("Of")


class ByAddress(Generic[Of]):
    """What there is one of at each server's address, for as long as its block runs: a prober, a scraper.

    What there is one of at each address while its block runs.
    """

    def __init__(self) -> None:
        self._by_url: dict[str, Of] = {}

    def get(self, url: str) -> Of | None:
        """None: there is none now."""
        return self._by_url.get(url)

    @contextmanager
    def kept(self, url: str, one: Of) -> Iterator[None]:
        """For the duration of the block. A later one at the same address stays when an earlier one's block ends."""
        self._by_url[url] = one
        try:
            yield
        finally:
            if self._by_url.get(url) is one:
                del self._by_url[url]
