# SPDX-License-Identifier: Apache-2.0
"""Paths below an endpoint's URL, if that has a path of its own, as in the `base_url` of OpenAI's SDK; and the reverse:
an endpoint's own URLs in the fields of its response, as the client knows them.

`https://host/openai/v1` and `https://host/v1beta/openai` stand for the client's `/v1`: a segment with a version is in
them. `https://host/gpu-1` has none: a server's `/v1` is below it. All other paths of the server, such as `/health`, are
beside its `/v1`.

A server writes its own address into a redirect, `Location` of what it created, `Content-Location` or `Link`: by the
`Host` that it got, which is its address and not lbproxy's. For a client that would lead past lbproxy, where it leads
anywhere, and show what no client is to know. In fields that hold references such a URL becomes its path, relative to
lbproxy; any other field with the address is left out. References to other hosts pass, and bodies are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from lbproxy.net.dialing.origin import Origin

REFERENCES: Final = frozenset(
    {b"location", b"content-location", b"link", b"refresh", b"uri", b"operation-location", b"azure-asyncoperation"}
)
"""Fields that hold URLs which clients follow."""
_WHOLE: Final = frozenset({b"location", b"content-location"})
"""Fields whose value is a URL and nothing else."""
_ABOUT_CLIENTS: Final = frozenset({b"access-control-allow-origin", b"date"})
"""Never about the endpoint: the first repeats the client's own Origin."""
_URL: Final = re.compile(
    rb"(?:(?:https?|wss?):)?//(?:[^\s/?#\"'<>,;\\]*@)?(\[[0-9A-Fa-f:.]*\]|[^\s/?#\"'<>,;\\:@\[\]]*)(?::[0-9]*)?"
    rb"([/?#][^\s\"'<>,;\\]*)?",
    re.IGNORECASE,
)


def may_name(lines: Iterable[bytes]) -> bool:
    """Whether a field line could have an address other than in `REFERENCES` or after `//`, with its `.` or `:`."""
    fields = (line.partition(b":") for line in lines)
    return any(name.lower() not in _ABOUT_CLIENTS and (b"." in value or b":" in value) for name, _, value in fields)


@lru_cache(maxsize=4096)
def host_of(base_url: str) -> bytes:
    """The host of an endpoint, as its fields would have it; without brackets. In lower case."""
    origin = Origin.parse(base_url)
    return b"localhost" if origin.socket_path is not None else origin[0].lower().encode()


def as_ours(fields: bytes, base_url: str) -> bytes:
    """Field lines, each with its CRLF, without the address of the endpoint at `base_url`."""
    lines = fields.split(b"\r\n")[:-1]
    return b"".join(line + b"\r\n" for line in (_line_as_ours(line, base_url) for line in lines) if line)


def _line_as_ours(line: bytes, base_url: str) -> bytes:
    """One field line; empty if it must not pass."""
    name, _, value = line.partition(b":")
    key = name.lower()
    if key in _ABOUT_CLIENTS:
        return line
    if key in REFERENCES:
        value = _URL.sub(lambda found: _url_as_ours(found, base_url), value)
        bare = value.strip(b" \t")
        if key in _WHOLE and bare.startswith(b"/") and not bare.startswith(b"//"):
            value = b" " + above(base_url, bare)
    return b"" if _address(base_url).search(value) else name + b":" + value


def _url_as_ours(found: re.Match[bytes], base_url: str) -> bytes:
    if not _is_own(found[1].strip(b"[]").rstrip(b".").lower(), host_of(base_url)):
        return found[0]
    rest = found[2] or b"/"
    return above(base_url, rest if rest.startswith(b"/") else b"/" + rest)


def _is_own(host: bytes, own: bytes) -> bool:
    """Whether a host is the endpoint's: by its name or address, or as it calls itself."""
    if host in (own, b"localhost", b""):
        return True
    try:
        address = ip_address(host.decode("ascii", "replace"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or str(address) == own.decode()


def above(base_url: str, target: bytes) -> bytes:
    """The client's request target for one at the endpoint, with or without query. It begins with exactly one `/`."""
    target = b"/" + target.lstrip(b"/")  # else it would be an authority
    before = prefixes(base_url)
    if before is None:
        return target
    beside, api = (one.encode() for one in before)
    if target.startswith(api + b"/"):
        return b"/v1" + target[len(api) :]
    if beside and target.startswith(beside + b"/"):
        return target[len(beside) :]
    return target


@lru_cache(maxsize=4096)
def _address(base_url: str) -> re.Pattern[bytes]:
    """Finds the endpoint's address: host and port, its URL, or the host alone if it is an IP address."""
    host, port = host_of(base_url), Origin.parse(base_url)[1]
    text = re.escape(host)
    try:
        ip_address(host.decode())
        forms = rb"%b|\[%b\]" % (text, text)
    except ValueError:
        forms = rb"//%b(?=[:/?#\s]|$)|%b:%d(?![0-9])" % (text, text, port)
    return re.compile(rb"(?<![0-9A-Za-z._-])(?:%b)(?![0-9A-Za-z_-]|\.[0-9A-Za-z])" % forms, re.IGNORECASE)


_VERSION: Final = re.compile(r"v[0-9]+[a-z0-9]*")
_V1: Final = "/v1/"


def below(base_url: str, target: str) -> str:
    """The request target at an endpoint, for a path (with or without query) as model servers have them."""
    before = prefixes(base_url)
    if before is None:
        return target
    beside, api = before
    return f"{api}/{target[len(_V1) :]}" if target.startswith(_V1) else beside + target


@lru_cache(maxsize=4096)  # once per request; URLs come from settings and discovery only
def prefixes(base_url: str) -> tuple[str, str] | None:
    """What is put before a path, and in place of `/v1`. None: the URL has no path."""
    path = "" if base_url.startswith("unix:") else urlsplit(base_url).path.rstrip("/")
    if not path:
        return None
    versions = [_VERSION.fullmatch(segment) is not None for segment in path.split("/")]
    api = path if any(versions) else f"{path}/v1"
    return path.rpartition("/")[0] if versions[-1] else path, api
