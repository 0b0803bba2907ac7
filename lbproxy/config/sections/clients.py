# SPDX-License-Identifier: Apache-2.0
"""Settings of the clients' side: where they connect, how long each phase of a request may take, what each may cost."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, TypeAlias

from pydantic import ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from lbproxy.config.section import Section, ShortSection
from lbproxy.config.values import Timeout, count, expected, hosts_overlap, read_host, read_socket_path, rule, size

Port: TypeAlias = Annotated[int, count("0", "65535")]


class Address(ShortSection):
    """Where lbproxy listens: `host:port`, `[ipv6]:port`, `unix:/path`, or a mapping."""

    unix: str | None = None
    """Instead of host and port: the absolute path of a Unix socket, at most 107 bytes."""
    mode: str = "0660"
    """The socket's file mode, in octal: clients need write permission."""
    host: str = ""
    """An IP address or a name; required without `unix`. 0.0.0.0 = every IPv4 address of this machine, `::` = every
    address."""
    port: Port = 0
    """Required with `host`. 0 = any free port, which the log shows."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, Address):
            return value
        if isinstance(value, dict):
            return _one_of_two(value)
        if isinstance(value, str) and value.startswith("unix:"):
            return {"unix": value.removeprefix("unix:")}
        match = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]+):([0-9]{1,5})", value) if isinstance(value, str) else None
        if match is None or read_host(match[1]) is None or int(match[2]) > 65535:
            raise expected("host:port, such as 127.0.0.1:8080 or [::1]:8080, or unix:/path")
        return {"host": match[1], "port": match[2]}

    @field_validator("unix", mode="after")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        path = None if value is None else read_socket_path(value)
        if value is not None and path is None:
            raise expected("an absolute path of 2 to 107 visible ASCII characters")
        return path

    @field_validator("mode", mode="before")
    @classmethod
    def _read_mode(cls, value: object) -> str:
        match = re.fullmatch("(?:0o?)?([0-7]{3})", str(value))  # YAML reads 0660 as a number: its digits are meant
        if match is None:
            raise expected("three octal digits, such as 0660")
        return f"0{match[1]}"

    @field_validator("host", mode="after")
    @classmethod
    def _check_host(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.data.get("unix", "") is not None:  # also if the path is wrong, which is reported
            return ""
        host = read_host(value) or read_host(f"[{value}]")
        if host is None:
            raise expected("an IP address or a host name")
        return host.strip("[]")

    @property
    def file_mode(self) -> int:
        """Of the Unix socket."""
        return int(self.mode, 8)

    def __str__(self) -> str:
        if self.unix is not None:
            return f"unix:{self.unix}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _one_of_two(value: dict[object, object]) -> dict[object, object]:
    """A mapping that has a path, or host and port."""
    is_unix = value.get("unix") is not None
    said = value.keys() & {"host", "port"}
    if len(said) != (0 if is_unix else 2):
        raise expected("host and port, or unix, and not both")
    if not is_unix and "mode" in value:
        raise expected("mode only with unix")
    return value


def leads_to(authority: str, address: Address) -> bool:
    """Whether an endpoint's `host:port` leads back to a listener of ours: such a request would go round for ever."""
    host, _, port = authority.rpartition(":")
    if int(port) != address.port:
        return False
    host = host.strip("[]")
    # A wildcard takes whatever this machine is called; of those names only these are known without resolving.
    return host == address.host or (host in ("127.0.0.1", "::1", "localhost") and hosts_overlap(host, address.host))


MAX_PATHS = 64
KNOWN_PATHS = (
    *("/health", "/v1/models", "/v1/chat/completions", "/generate", "/completion", "/infill", "/inference/v1/generate"),
    *("/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/pooling", "/classify", "/"),
    *(f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings", "show", "version", "tags", "ps")),
    *(f"/api/{name}" for name in ("pull", "push", "create", "copy", "delete", "blobs/sha256:0")),
)
"""What no path of one's own may match: all outside /v1/ that `proxy.request.routes` knows (a test holds the two
together: config may not import proxy)."""
_MODEL = "{model}"
_LITERAL = re.compile(r"[A-Za-z0-9._~:@!$&'()+,=-]+")
_SEGMENT = r"[^/%;?#\\]+"
"""Neither escapes nor parameters, which servers read in different ways."""


@lru_cache(maxsize=MAX_PATHS)
def path_pattern(text: str) -> re.Pattern[str]:
    """What matches the request targets that a path of `inference_paths` means, with a group `model` if that is in them.
    Raises PydanticCustomError.
    """
    first, *more = text.removeprefix("/").split("/")
    rest = more[:-1] if more and more[-1] == "*" else more
    is_path = text.startswith("/") and _LITERAL.fullmatch(first) is not None and len(text) <= 1024
    if not is_path or rest.count(_MODEL) > 1 or not all(one == _MODEL or _LITERAL.fullmatch(one) for one in rest):
        raise expected("a path, such as /predict or /v2/models/{model}/*")
    parts = [rf"(?P<model>{_SEGMENT})" if one == _MODEL else re.escape(one) for one in (first, *rest)]
    many = rf"(?:/{_SEGMENT})+" if len(rest) < len(more) else ""
    pattern = rf"/{'/'.join(parts)}{many}/?(?:\?.*)?"
    if first.lower() == "v1" or any(re.fullmatch(pattern, known, re.IGNORECASE) for known in KNOWN_PATHS):
        raise expected("a path that lbproxy does not know by itself")
    return re.compile(pattern)


class TimeoutSettings(Section):
    """How long each phase of a request may take. There is no limit for a complete response: generations run for
    minutes."""

    connect: Timeout = 1.0
    """For a TCP connection to an endpoint; then the next is tried."""
    first_byte: Timeout = 600.0
    """Until a response begins (of a stream: the first event). 600 s is the OpenAI client's own limit."""
    stream_idle: Timeout = 300.0
    """Without a byte from the endpoint within a response; on a WebSocket from either side, until both are pinged."""
    client_head: Timeout = 10.0
    """For a request's head, from its first byte; for the first request, from the connection."""
    client_body: Timeout = 3600.0
    """For a complete request body: high, because `limits.body_rate` ends slow ones."""
    client_stall: Timeout = 60.0
    """Time in which a client must read some of the data that waits for it, 1 KiB/s on average; else it is
    disconnected."""
    client_idle: Timeout = 75.0
    """A client's idle connection is kept open for this long."""


_BODY = size("1KiB", "1GiB")
_BODY_BYTES = 64 * 1024**2
"""Some images of a camera, in base64."""


class LimitSettings(Section):
    """Limits of what lbproxy holds in memory for clients."""

    json_body: Annotated[int, _BODY] = _BODY_BYTES
    """A JSON request body, images included, or a WebSocket frame; larger ones get 413. Lowered with body."""
    body: Annotated[int, _BODY] = _BODY_BYTES
    """Any other request body (audio, images); at least json_body."""
    body_rate: Annotated[int, size("1", "1GiB")] = 16 * 1024
    """Bytes per second of a request body, after its first 10 s; slower ones get 408. A faster one may stand still for
    20 s."""
    connections: Annotated[int, count("1", "1000000")] = 10_000
    """Client connections; also at most 45 % of the file descriptors."""
    buffered_bodies: Annotated[int, size("1MiB", "1024GiB")] | None = None
    """All request bodies in memory; more get 503. null = a quarter of memory, at most 512 MiB."""
    memory: Annotated[int, size("16MiB", "1024GiB")] | None = None
    """At 92 % of it, new requests get 503. null = the limit of the cgroup, else the machine's memory."""

    @model_validator(mode="before")
    @classmethod
    def _json_body_follows(cls, value: object) -> object:
        if not isinstance(value, dict) or "body" not in value or "json_body" in value:
            return value
        with suppress(PydanticCustomError):  # what is wrong with `body` is said of `body`
            return {**value, "json_body": min(_BODY.read(value["body"]), _BODY_BYTES)}
        return value

    _holds_json_body = rule("body", "at least limits.json_body", lambda body, other: body < other("json_body", 0))
