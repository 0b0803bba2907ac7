"""Which endpoint has which stored response.

A server that stores a response (`/v1/responses`, or a chat with `store`) has it alone: what goes on with it
(`previous_response_id`) or is about it (GET, cancel, DELETE) must go there, also while that server drains. Nothing else
is ever pinned. Here is remembered which one it is, with the keys of the prompt, which the next prompt begins with.

Bounded: the response that was used longest ago is forgotten first, and each after `KEPT_S`. What is not remembered here
is placed like any other request, and asked for elsewhere if an endpoint does not have it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.requests.prompt_keys import BlockKey
from lbproxy.core.requests.request import InferenceRequest

MAX_RESPONSES = 100_000
"""Some 300 bytes each, without the keys."""
MAX_KEYS = 2_000_000
"""Of all of them together, 8 bytes each: they are those of the index of prefixes."""
KEPT_S: Final = 24 * 3600.0
"""After its last use. Servers keep responses in memory until they are stopped."""


class StoredResponse(NamedTuple):
    """One stored response."""

    uid: EndpointUid
    until: float
    prompt_bytes: int
    """Of the prompt that it answered, with all that went before."""
    block_keys: tuple[BlockKey, ...]


class StoredResponses:
    """The stored responses that were used last."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._keys = 0

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._stored)

    def remember(self, response_id: str, uid: EndpointUid, request: InferenceRequest, *, now: float) -> None:
        """This endpoint stores the response with this id to `request`."""
        self.forget(response_id)
        keys = request.block_keys
        self._stored[response_id] = StoredResponse(uid, now + KEPT_S, request.prompt_bytes, keys)
        self._keys += len(keys)
        while len(self._stored) > MAX_RESPONSES or self._keys > MAX_KEYS:
            _, oldest = self._stored.popitem(last=False)
            self._keys -= len(oldest.block_keys)

    def find(self, response_id: str, *, now: float) -> StoredResponse | None:
        """Who has it; None: that is not known, or not any more. To be asked for is to be used."""
        found = self._stored.get(response_id)
        if found is None:
            return None
        if now >= found.until:
            self.forget(response_id)
            return None
        self._stored[response_id] = found._replace(until=now + KEPT_S)
        self._stored.move_to_end(response_id)
        return found

    def forget(self, response_id: str) -> None:
        """It is not there any more."""
        gone = self._stored.pop(response_id, None)
        if gone is not None:
            self._keys -= len(gone.block_keys)
