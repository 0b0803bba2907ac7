# SPDX-License-Identifier: Apache-2.0
"""Which models the messages of a WebSocket's client name, where it may not name all: vLLM's realtime API takes the
model from a message, and not from the query. Sans-io.

A message is looked at when its last fragment comes. Those before it were passed on: without the last one there is no
message, so nothing has happened at the server if that is held back.
"""

from __future__ import annotations

from typing import Final

import orjson

from lbproxy.core.requests.models import Allowed, models_within
from lbproxy.proxy.sockets.frames import DATA, POLICY_VIOLATION, TOO_BIG, Frame, FrameError

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Of a client that may not name every model: what is looked at takes some milliseconds, and is held."""


class OwnModels:
    """The messages of one client."""

    def __init__(self, allowed: tuple[Allowed, ...]) -> None:
        """`allowed`: each model must be in all of these."""
        self._allowed = allowed
        self.held = bytearray()
        """Of the message that is not complete."""

    def check(self, frame: Frame) -> None:
        """Raises FrameError if the message that ends with this frame names another model, at any depth, or is too
        large.
        """
        if frame.opcode not in DATA:
            return
        if len(self.held) + len(frame.data) > MAX_MESSAGE_BYTES:
            raise FrameError(TOO_BIG, "the message is too large for a client with models of its own")
        self.held += frame.data
        if frame.fin:
            message, self.held = bytes(self.held), bytearray()
            if not self._is_allowed(message):
                raise FrameError(POLICY_VIOLATION, "model_not_found")

    def _is_allowed(self, message: bytes) -> bool:
        try:
            return all(name in one for name in models_within(message) for one in self._allowed)
        except orjson.JSONDecodeError:
            return False
