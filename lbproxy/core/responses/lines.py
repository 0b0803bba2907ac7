# SPDX-License-Identifier: Apache-2.0
"""The watcher of a stream of JSON lines, as Ollama sends them: each line is an event, and the last one says `done` and
what was used. It is to such a stream what `sse.EventScanner` is to one of events.
"""

from __future__ import annotations

from typing import Final

import orjson

from lbproxy.core.requests.request import Usage
from lbproxy.core.responses.sse import LINE_BYTES, EventScanner
from lbproxy.core.responses.usage import read_native

_LINE_FEED: Final = b"\n"


class LineScanner(EventScanner):
    """Scans the payload of one response, which it gets in order, in pieces of any size."""

    def __init__(self) -> None:
        EventScanner.__init__(self)
        self._reported: Usage | None = None
        self._is_done = False
        """There was a line that ends each such stream."""

    def feed(self, data: bytes, start: int, end: int) -> None:
        if start == end:
            return
        lines, found, rest = data[start:end].rpartition(_LINE_FEED)
        if found:
            self.events += lines.count(_LINE_FEED) + int(self.at_boundary)
            for line in (bytes(self._carried) + lines).split(_LINE_FEED):
                self._read_line(line)
            self._carried.clear()
        if rest:
            self.events += int(self.at_boundary or bool(found))
            self._carried += rest[: LINE_BYTES + 1 - len(self._carried)]
        self.at_boundary = not rest
        self.has_content = True

    def is_token(self, data: bytes, start: int, end: int) -> bool:
        return False

    def _read_line(self, line: bytes) -> None:
        try:
            said = orjson.loads(line) if len(line) <= LINE_BYTES else None
        except orjson.JSONDecodeError:
            return
        if type(said) is not dict:
            return
        message = said.get("message")
        for part in (said, message if type(message) is dict else {}):
            for name in ("response", "content", "thinking"):
                text = part.get(name)
                if type(text) is str:
                    self.text_bytes += len(text.encode("utf-8", "surrogatepass"))
        self._is_done = self._is_done or said.get("done") is True or "error" in said
        self._reported = read_native(said) or self._reported

    @property
    def usage(self) -> Usage | None:
        return self._reported

    @property
    def is_complete(self) -> bool:
        return self.at_boundary and self._is_done
