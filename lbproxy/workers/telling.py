# SPDX-License-Identifier: Apache-2.0
"""What one worker is told of endpoints' models: what changed, in pieces, as fast as it reads them.

Model lists may have tens of megabytes together: of hundreds of endpoints with a thousand adapters each, or of one
server that says so. They are fed to the link (`Link.feed`), each when it is its turn, as it is then. A list that
changes again meanwhile is told once. Ranks of one server have one list. Messages that must come after what is due now
wait behind it (`after`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.requests.openai import ModelCard
from lbproxy.driver.runtime import Runtime
from lbproxy.workers import messages as m
from lbproxy.workers.link import Link, Sent

PIECE_BYTES: Final = 64 << 10
"""Bytes of cards in one message."""
List: TypeAlias = Mapping[str, ModelCard] | None
"""What an endpoint lists; None = it has no such list."""


class Telling:
    """The model lists of one worker."""

    def __init__(self, runtime: Runtime, link: Link[m.FromWorker]) -> None:
        self._runtime = runtime
        self._link = link
        self._told: dict[EndpointUid, List] = {}
        """What the worker knows, or will once it has read what was sent."""
        self._due: set[EndpointUid] = set()
        self._queue: deque[EndpointUid | Sent] = deque()
        self._feeds = False
        """`_messages` is being fed."""

    def tell(self, uids: Iterable[EndpointUid]) -> None:
        """The lists of these endpoints may have changed."""
        for uid in uids:
            if uid not in self._due:
                self._due.add(uid)
                self._queue.append(uid)
        self._feed()

    def after(self, message: Sent) -> None:
        """Send a message after all lists that are due now."""
        self._queue.append(message)
        self._feed()

    def _feed(self) -> None:
        if self._queue and not self._feeds:
            self._feeds = True
            self._link.feed(self._messages())

    def _messages(self) -> Iterator[Sent]:
        while self._queue:
            one = self._queue.popleft()
            if not isinstance(one, int):
                yield one
            elif one in self._due:
                yield from self._list_of(EndpointUid(one))
        self._feeds = False

    def _list_of(self, uid: EndpointUid) -> Iterator[Sent]:
        """The list of an endpoint, with all at its address that have the same and were told the same."""
        ranks = self._runtime.balancer.endpoints.at_address(uid)
        if not ranks:  # it left the set
            self._due.discard(uid)
            self._told.pop(uid, None)
            return
        models = next(state.models for state in ranks if state.endpoint.uid == uid)
        before, was_told = self._told.get(uid), uid in self._told
        alike = [
            state.endpoint.uid
            for state in ranks
            if state.models is models
            and self._told.get(state.endpoint.uid) is before
            and (state.endpoint.uid in self._told) is was_told
        ]
        self._due.difference_update(alike)
        self._told.update(dict.fromkeys(alike, models))
        if models is None:
            yield m.Models([*alike], None)
        else:
            yield from _pieces([*alike], before, models)


def _pieces(uids: list[int], before: List, models: Mapping[str, ModelCard]) -> Iterator[m.Models]:
    """A list: what changed since `before`, or all of it if that is not known."""
    known = before or {}
    cards = [card for card in models.values() if known.get(card.id) != card]
    gone = [name for name in known if name not in models]
    adds = before is not None and len(gone) < len(models)
    if adds and not cards and not gone:
        return
    if not adds:
        cards, gone = [*models.values()], []
    piece: list[m.Card] = []
    size = 0
    for card in cards:
        told = card.context_tokens, card.context_is_of_prompt, card.engine
        piece.append(m.Card(card.id, card.raw, card.parent, *told))
        size += len(card.raw) + len(card.id)
        if size >= PIECE_BYTES:
            yield m.Models(uids, piece, gone, adds, True)
            piece, gone, adds, size = [], [], True, 0
    yield m.Models(uids, piece, gone, adds)
