# SPDX-License-Identifier: Apache-2.0
"""What an endpoint's messages over a WebSocket took: the tokens that they report, each message of which none is
reported counting as one. Sans-io.

A WebSocket lives for hours and has many responses. Realtime APIs and OpenAI's responses report the usage of each in the
message that ends it, vLLM that of each transcription: what they used is the sum.
"""

from __future__ import annotations

from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.usage import MessageUsage
from lbproxy.proxy.sockets.frames import Frame, Opcode


class ServedMessages:
    """The data frames of one endpoint, in their order."""

    def __init__(self) -> None:
        self._reported = MessageUsage()
        self._is_text = False
        """Of the message that the last frame is of."""
        self._untold = 0
        """Tokens that `take` has not returned yet."""
        self._since = 0
        """Messages since usage was reported last."""
        self._written = 0
        """Of those, the ones that have a part of a response: others follow a report, too."""

    def note(self, frame: Frame) -> None:
        """The next frame of data."""
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._untold += frame.fin
        self._since += frame.fin
        if not self._is_text:
            return
        data = bytes(frame.data)
        self._written += frame.fin and b"delta" in data
        usage = self._reported.feed(data, ends=frame.fin)
        if usage is not None:
            self._untold += max(0, (usage.completion_tokens or 0) - self._since)
            self._since = self._written = 0

    def take(self) -> int:
        """The tokens of responses since the last call, as far as known."""
        untold, self._untold = self._untold, 0
        return untold

    @property
    def usage(self) -> Usage | None:
        """All that was reported, and an estimate of what was generated since; None if nothing was reported."""
        total = self._reported.total
        return total and total._replace(completion_tokens=(total.completion_tokens or 0) + self._written)
