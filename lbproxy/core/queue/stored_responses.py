# SPDX-License-Identifier: Apache-2.0
"""Which endpoint has which stored response, or other object that one server made: a file, a batch, a conversation
(`core.responses.objects`). Below, `response` stands for any of them.

Only the server that stored a response (`/v1/responses`, or a chat with `store`) has it. Requests that continue it
(`previous_response_id`) or are about it (GET, cancel, DELETE) must go there, even while that server drains. No other
requests are pinned. This remembers the endpoint, with the keys of the prompt, with which the next prompt begins.

The first endpoint that is known to store an id keeps it. Bounded: the least recently used response is forgotten first,
and each after `KEPT_S`. Requests about other responses are placed like any other, and retried elsewhere if an endpoint
does not have the response.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.requests.prompt_keys import BlockKey
from lbproxy.core.requests.request import InferenceRequest

MAX_RESPONSES = 100_000
"""Some 300 bytes each, without the keys."""
MAX_KEYS = 2_000_000
"""Of all of them together, 8 bytes each: the key objects are those of the prefix index."""
KEPT_S: Final = 24 * 3600.0
"""After its last use. Servers keep responses in memory until they are stopped."""


class StoredResponse(NamedTuple):
    """One stored response."""

    uid: EndpointUid
    until: float
    prompt_bytes: int
    """Of the prompt of that response, with the conversation before it."""
    block_keys: tuple[BlockKey, ...]


class StoredResponses:
    """The stored responses that were used last."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._keys = 0
        self.told: Callable[[str, StoredResponse], None] | None = None
        """Called with each response that is remembered."""

    def __len__(self) -> int:
        return len(self._stored)

    def remember(self, response_id: str, uid: EndpointUid, request: InferenceRequest, *, now: float) -> None:
        """Note that this endpoint stores the response to `request` under this id.

        Not if another is known to: engines let a client choose the id of its response, and it could choose that of
        another client's response, which would not be found any more.
        """
        known = self._stored.get(response_id)
        if known is not None and known.uid != uid and now < known.until:
            return
        noted = self.note(response_id, uid, request.prompt_bytes, request.block_keys, now=now)
        if self.told is not None:
            self.told(response_id, noted)

    def note(
        self, response_id: str, uid: EndpointUid, prompt_bytes: int, keys: tuple[BlockKey, ...], *, now: float
    ) -> StoredResponse:
        """Note that this endpoint stores a response under this id, to a prompt of this size with these keys."""
        self.forget(response_id)
        self._stored[response_id] = noted = StoredResponse(uid, now + KEPT_S, prompt_bytes, keys)
        self._keys += len(keys)
        while len(self._stored) > MAX_RESPONSES or self._keys > MAX_KEYS:
            _, oldest = self._stored.popitem(last=False)
            self._keys -= len(oldest.block_keys)
        return noted

    def latest(self, most: int) -> list[tuple[str, StoredResponse]]:
        """The responses that were used last, with their ids."""
        return list(islice(reversed(self._stored.items()), most))

    def find(self, response_id: str, *, now: float) -> StoredResponse | None:
        """The stored response; None: not known, or not any more. A look-up counts as a use."""
        found = self._stored.get(response_id)
        if found is None:
            return None
        if now >= found.until:
            self.forget(response_id)
            return None
        self._stored[response_id] = found._replace(until=now + KEPT_S)
        self._stored.move_to_end(response_id)
        return found

    def move(self, uids: Mapping[EndpointUid, EndpointUid]) -> None:
        """Note that endpoints have other uids now: old to new. O(stored responses)."""
        for response_id, one in self._stored.items():
            self._stored[response_id] = one._replace(uid=uids.get(one.uid, one.uid))

    def forget(self, response_id: str) -> None:
        gone = self._stored.pop(response_id, None)
        if gone is not None:
            self._keys -= len(gone.block_keys)
