# SPDX-License-Identifier: Apache-2.0
"""The load client, in a process of its own: asks, and writes one JSON line about how each request ended.

    python -m tests.chaos.client PLAN        PLAN: `Plan` as JSON. End of its stdin = begin nothing more.

It speaks HTTP/1.1 over sockets itself, because what matters here is what client libraries hide: whether a connection
was refused, closed or reset, when, and whether an answer that ended well was whole. Times are monotonic seconds, which
on Linux all processes share.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import uvloop

ERROR_EVENT = b'data: {"error"'
COMMENTS = re.compile(rb"(?::[^\n]*\n+)*")
LAST_COMMENTS = re.compile(rb"(?:(?<=\n):[^\n]*\n\n)+\Z")
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to ask, how often."""

    url: str
    workers: int = 8
    """Closed loop: each sends its next request when its last one ended."""
    rate: float | None = None
    """Requests a second from each worker at most; None = one after the other."""
    count: int | None = None
    """Requests in all; None: until told to stop."""
    tokens: int = 50
    streams: float = 1.0
    """Share of requests whose answers are streamed."""
    prompt_bytes: int = 40
    keep_alive: bool = True
    deadline_s: float = 12.0
    """What the client gives a request."""
    pause_s: float = 0.0
    retry: bool = False
    """Whether a connection that turns out closed is asked for once more on a new one, as client libraries do."""
    model: str = "sim"
    extra: dict[str, object] = field(default_factory=dict)
    """Further fields of the body."""


@dataclass(slots=True)
class Result:
    """How one request ended."""

    at: float = 0.0
    how: str = ""
    """ok: whole · error: an HTTP error · told: an error event in the stream · glued: one behind half a line · cut: it
    ended before its end · reset: the same with RST · dropped: closed without a byte · refused: no connection · hung:
    the client gave up · silent: a normal end of an answer that is not whole."""
    status: int = 0
    code: str = ""
    endpoint: str = ""
    attempts: int = 0
    first_s: float | None = None
    """From `at` to the first byte of a response's body; None: none came. Comments of a stream are none, nor is an error
    event behind them."""
    seconds: float = 0.0
    events: int = 0
    gap_s: float = 0.0
    """The longest time between two reads of the body."""
    silent_s: float = 0.0
    """From the last byte that came to the end."""
    retry_after: str = ""

    @property
    def end(self) -> float:
        return self.at + self.seconds

    @property
    def failed(self) -> bool:
        """Neither whole nor broken off in the middle: a client that had nothing yet got nothing."""
        return self.how in {"error", "told", "refused", "dropped", "hung"} and self.first_s is None


class BrokenError(Exception):
    """The connection ended before the answer did."""


class Answer:
    """An answer, fed as it comes."""

    def __init__(self, result: Result, streamed: bool, tokens: int) -> None:
        self._result = result
        self._streamed = streamed
        self._tokens = tokens
        self._raw = b""
        self._framing: str | int | None = None
        self._chunk_left = 0
        self._body = bytearray()
        self.done = False
        self.keep = False
        self.told = False
        self.glued = False
        """The error event stands behind half a line, where no client can read it."""
        self._last = 0.0

    def feed(self, data: bytes) -> None:
        now = time.monotonic()
        self._raw += data
        if self._framing is None:
            head, end, rest = self._raw.partition(b"\r\n\r\n")
            if not end:
                return
            self._raw = rest
            self._read_head(head.decode("latin-1"))
        before = len(self._body)
        self._decode()
        if len(self._body) > before:
            if self._result.first_s is None and self._result.status < 400 and self._says_something():
                self._result.first_s = now - self._result.at
            elif self._last:
                self._result.gap_s = max(self._result.gap_s, now - self._last)
            self._last = now

    def _says_something(self) -> bool:
        """Whether something else came than comments and an error event."""
        said = COMMENTS.match(self._body)
        rest = bytes(self._body[said.end() if said else 0 :][: len(ERROR_EVENT)])
        return not self._streamed or not (rest[:1] in {b"", b":"} or rest == ERROR_EVENT)

    def _read_head(self, head: str) -> None:
        status, _, lines = head.partition("\r\n")
        fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines.split("\r\n"))}
        result = self._result
        result.status = int(status.split()[1])
        result.endpoint = fields.get("x-lbproxy-endpoint", "")
        result.attempts = int(fields.get("x-lbproxy-attempts", "0"))
        result.retry_after = fields.get("retry-after", "")
        self.keep = fields.get("connection", "").lower() != "close" and status.startswith("HTTP/1.1")
        if "chunked" in fields.get("transfer-encoding", ""):
            self._framing = "chunked"
        elif "content-length" in fields:
            self._framing = int(fields["content-length"])
        else:
            self._framing, self.keep = "close", False

    def _decode(self) -> None:
        if self._framing == "chunked":
            self._decode_chunks()
        else:
            self._add(self._raw)
            self._raw = b""
            self.done = len(self._body) == self._framing

    def _decode_chunks(self) -> None:
        raw, at = self._raw, 0
        while not self.done:
            if self._chunk_left:
                piece = raw[at : at + self._chunk_left]
                if not piece:
                    break
                self._add(piece[: max(0, self._chunk_left - 2)] if self._chunk_left > 2 else b"")
                self._chunk_left -= len(piece)
                at += len(piece)
                continue
            end = raw.find(b"\r\n", at)
            if end < 0:
                break
            size = int(raw[at:end], 16)
            self.done = not size
            self._chunk_left = size + 2 if size else 0
            at = end + 2
        self._raw = raw[at:]

    def _add(self, payload: bytes) -> None:
        if not payload:
            return
        start = max(0, len(self._body) - len(ERROR_EVENT))
        self._body += payload
        if self._streamed:
            self._result.events += payload.count(b"data: ")
            at = -1 if self.told else self._body.find(ERROR_EVENT, start)
            if at >= 0:
                self.told = True
                self.glued = at > 0 and self._body[at - 2 : at] != b"\n\n"

    def ended(self) -> None:
        """The connection was closed in order."""
        if self._framing != "close":
            raise BrokenError
        self.done = True

    def verdict(self) -> str:
        """How an answer that came to its end is to be called."""
        if self._result.status >= 400:
            found = re.search(rb'"code": ?"?([\w-]+)', self._body)
            self._result.code = found[1].decode() if found else ""
            return "error"
        if self.told:
            found = re.search(rb'"code": ?"?([\w-]+)', self._body[self._body.find(ERROR_EVENT) :])
            self._result.code = found[1].decode() if found else ""
            return "told"
        return "ok" if self._whole() else "silent"

    def _whole(self) -> bool:
        if self._streamed:
            said = LAST_COMMENTS.sub(b"", self._body)
            return said.endswith(DONE) and self._result.events > self._tokens
        try:
            said = json.loads(self._body)
        except ValueError:
            return False
        return bool(said.get("usage", {}).get("completion_tokens") == self._tokens)


class Connection:
    """One that may be used again."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, plan: Plan, number: int, streamed: bool) -> Result:
        result = Result(at=time.monotonic())
        used = self._streams is not None
        try:
            async with asyncio.timeout(plan.deadline_s):
                await self._exchange(plan, number, streamed, result)
        except TimeoutError:
            result.how = "hung"
            self.close()
        result.seconds = time.monotonic() - result.at
        if used and plan.retry and result.how == "dropped":
            return await self.ask(plan, number, streamed)
        return result

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _exchange(self, plan: Plan, number: int, streamed: bool, result: Result) -> None:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(*self._address, limit=1 << 20)
        except OSError:
            result.how = "refused"
            return
        reader, writer = self._streams
        answer = Answer(result, streamed, plan.tokens)
        last = time.monotonic()
        try:
            writer.write(request(plan, number, streamed))
            while not answer.done:
                data = await reader.read(1 << 18)
                if data:
                    last = time.monotonic()
                    answer.feed(data)
                else:
                    answer.ended()
            result.how = answer.verdict()
        except (BrokenError, OSError) as error:
            name = "reset" if isinstance(error, OSError) else "cut"
            result.how = "told" if answer.told else name if result.status else "dropped"
            if answer.told:
                answer.verdict()
            if answer.glued:
                result.how = "glued"
        result.silent_s = time.monotonic() - last
        if result.how not in {"ok", "error", "silent"} or not (answer.keep and plan.keep_alive):
            self.close()


def request(plan: Plan, number: int, streamed: bool) -> bytes:
    prompt = f"{number} {time.monotonic_ns()} ".ljust(plan.prompt_bytes, "x")
    fields = {"model": plan.model, "prompt": prompt, "max_tokens": plan.tokens, "ignore_eos": True, "stream": streamed}
    body = json.dumps(fields | plan.extra).encode()
    more = "" if plan.keep_alive else "Connection: close\r\n"
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{more}\r\n"
    ).encode() + body


async def work(plan: Plan, number: int, stop: asyncio.Event, left: list[int]) -> None:
    """One worker."""
    parts = urlsplit(plan.url)
    connection = Connection(parts.hostname or "", parts.port or 80)
    loop = asyncio.get_running_loop()
    due = loop.time() + (number / plan.workers / plan.rate if plan.rate else 0.0)
    asked = number
    while left[0] > 0:
        if plan.rate is not None:
            await _stopped(stop, due - loop.time())
            due += 1 / plan.rate
        if stop.is_set() or left[0] <= 0:
            break
        left[0] -= 1
        streamed = (asked * 0.618034) % 1 < plan.streams
        asked += 1
        result = await connection.ask(plan, number, streamed)
        sys.stdout.write(json.dumps(asdict(result)) + "\n")
        sys.stdout.flush()
        pause_s = plan.pause_s if result.how == "ok" else max(plan.pause_s, 0.02)
        if pause_s and plan.rate is None:
            await _stopped(stop, pause_s)
    connection.close()


async def _stopped(stop: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until told to stop."""
    if seconds > 0:
        try:
            async with asyncio.timeout(seconds):
                await stop.wait()
        except TimeoutError:
            pass


async def main(plan: Plan) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_input() -> None:
        if not os.read(0, 64):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, on_input)
    left = [plan.count if plan.count is not None else 1 << 60]
    async with asyncio.TaskGroup() as tasks:
        for number in range(plan.workers):
            tasks.create_task(work(plan, number, stop, left))


if __name__ == "__main__":
    uvloop.run(main(Plan(**json.loads(sys.argv[1]))))
