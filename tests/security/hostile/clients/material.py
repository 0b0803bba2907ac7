# SPDX-License-Identifier: Apache-2.0
"""Heads and bodies for the hostile: valid ones, the largest that are legal, and nearly valid ones."""

from __future__ import annotations

import json
import random

from tests.fuzz.mutate import mutate
from tests.security.hostile.clients.wire import Prey

MIB = 1 << 20
CHAT = "/v1/chat/completions"
JSON = "application/json"


def chat(prey: Prey, prompt: str = "Once", **more: object) -> bytes:
    """The body of a chat request."""
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"model": prey.model, "messages": messages, "max_tokens": 3, **more}).encode()


def head(prey: Prey, path: str = CHAT, more: str = "", *, method: str = "POST", kind: str = JSON) -> bytes:
    """A request's head with a key if there is one. `more`: further field lines, each with its CRLF."""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{prey.credentials}Content-Type: {kind}\r\n{more}\r\n"
    ).encode()


def sized(prey: Prey, size: int, path: str = CHAT, more: str = "", *, kind: str = JSON) -> bytes:
    """A head that announces a body of this size."""
    return head(prey, path, f"Content-Length: {size}\r\n{more}", kind=kind)


def post(prey: Prey, body: bytes, path: str = CHAT, more: str = "", *, kind: str = JSON) -> bytes:
    """A whole request, for the fast lane if nothing of `more` is for the other."""
    return sized(prey, len(body), path, more, kind=kind) + body


def get(prey: Prey, path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{prey.credentials}{more}\r\n".encode()


def chunked(prey: Prey, path: str = CHAT, more: str = "") -> bytes:
    """A head for the slow lane, whose body has no announced size."""
    return head(prey, path, f"Transfer-Encoding: chunked\r\n{more}")


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


LAST_CHUNK = b"0\r\n\r\n"


def stream(prey: Prey, events: int, pace_ms: int = 0) -> bytes:
    """A request whose answer is a stream of so many events, with that time between two."""
    return post(prey, chat(prey, stream=True, answer_events=events, pace_ms=pace_ms))


def long_head(prey: Prey, size: int, fields: int, method_line: str = "GET /health HTTP/1.1") -> bytes:
    """A head of about `size` bytes in so many fields."""
    each = max(8, size // fields - 16)
    lines = "".join(f"X-Field-{n:04}: {'v' * each}\r\n" for n in range(fields))
    return f"{method_line}\r\nHost: 127.0.0.1\r\n{prey.credentials}{lines}\r\n".encode()


def short_strings(prey: Prey, size: int) -> bytes:
    """JSON of many short values, each of which somebody has to look at."""
    return chat(prey, "x", metadata=["a"] * (size // 5))


def deep(prey: Prey, depth: int) -> bytes:
    nested = b"[" * depth + b"]" * depth
    return chat(prey)[:-1] + b', "metadata": ' + nested + b"}"


def many_keys(prey: Prey, count: int) -> bytes:
    """Names of which a reader may keep a set, some of them twice."""
    keys = ", ".join(f'"k{n % (count // 2 + 1)}": {n}' for n in range(count))
    return chat(prey)[:-1] + f", {keys}}}".encode()


def form(prey: Prey, parts: int, filler: int = 0) -> tuple[bytes, str]:
    """A form of many small parts, and its content type."""
    edge = "edge"
    lines = [
        f'--{edge}\r\nContent-Disposition: form-data; name="f{n}"; a="{"p" * 40}"\r\n\r\n{"x" * filler}\r\n'
        for n in range(parts)
    ]
    model = f'--{edge}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{prey.model}\r\n'
    return ("".join(lines) + model + f"--{edge}--\r\n").encode(), f"multipart/form-data; boundary={edge}"


def samples(prey: Prey) -> list[bytes]:
    """Valid requests of all sorts."""
    body, kind = form(prey, 3, 10)
    audio = "/v1/audio/transcriptions"
    responses = json.dumps({"model": prey.model, "input": "hi", "stream": True}).encode()
    messages = json.dumps({"model": prey.model, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]})
    return [
        post(prey, chat(prey)),
        post(prey, chat(prey, stream=True)),
        post(prey, chat(prey), more="Expect: 100-continue\r\n"),
        post(prey, chat(prey), more="Connection: close\r\n"),
        post(prey, responses, "/v1/responses"),
        post(prey, messages.encode(), "/v1/messages", "anthropic-version: 2023-06-01\r\n"),
        post(prey, body, audio, kind=kind),
        chunked(prey) + chunk(chat(prey)[:20]) + chunk(chat(prey)[20:], b";a=b") + LAST_CHUNK,
        chunked(prey) + chunk(chat(prey)) + b"0\r\nTrailer: yes\r\n\r\n",
        get(prey, "/v1/models"),
        get(prey, "/health"),
        get(prey, f"/v1/realtime?model={prey.model}", upgrade_fields()),
        b"OPTIONS /v1/models HTTP/1.1\r\nHost: a\r\nOrigin: http://b\r\nAccess-Control-Request-Method: GET\r\n\r\n",
        b"HEAD /v1/models HTTP/1.0\r\n\r\n",
        b"DELETE /v1/responses/resp_1 HTTP/1.1\r\nHost: a\r\n" + prey.credentials.encode() + b"\r\n",
    ]


def upgrade_fields() -> str:
    return (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )


TOKENS = (
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b"\t", b":", b"0", b"\x00", b"\xff", b"0\r\n\r\n", b"ffffffff\r\n"),
    *(
        b"GET / HTTP/1.1\r\n",
        b"HTTP/1.1",
        b"HTTP/2",
        b"Host: a\r\n",
        b"Content-Length: 0\r\n",
        b"Content-Length: 99\r\n",
    ),
    *(b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n"),
    *(b'"model"', b'"stream":true', b"[" * 200, b'{"a":' * 200, b'"\\ud800"', b"%00", b"%2F", b"/../", b"?" * 300),
)


def mutated(prey: Prey, rng: random.Random) -> bytes:
    """Some valid request, changed in a few places."""
    return mutate(rng, samples(prey), TOKENS)
