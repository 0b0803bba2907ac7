# SPDX-License-Identifier: Apache-2.0
"""The destination of a connection. Not in pool.py, which is compiled: a compiled class cannot be a tuple."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from lbproxy.core.endpoints.credentials import ForwardProxy, Tls


class Origin(tuple[str, int, Tls | None, ForwardProxy | None]):
    """The destination of a connection: host, port, how its certificate is verified (None: no TLS), and the proxy to use
    (None: no proxy).

    For a Unix socket: its absolute path, which cannot be a host, and port 0.
    """

    __slots__ = ()

    def __new__(cls, address: tuple[str, int], tls: Tls | None = None, proxy: ForwardProxy | None = None) -> Origin:
        """From host (without brackets) and port."""
        return super().__new__(cls, (address[0], address[1], tls, proxy))

    @classmethod
    @lru_cache(maxsize=4096)  # once per request; URLs come from settings and discovery only
    def parse(cls, base_url: str, tls: Tls | None = None, proxy: ForwardProxy | None = None) -> Origin:
        """From `http[s]://host[:port][/path]` or `unix:/path/of/socket`. `tls`: for an https URL; None = the
        default.
        """
        if base_url.startswith("unix:"):
            return cls((base_url.removeprefix("unix:"), 0))
        url = urlsplit(base_url)
        assert url.hostname is not None, "settings and discovery let no other URL through"
        if url.scheme != "https":
            return cls((url.hostname, url.port or 80), None, proxy)
        return cls((url.hostname, url.port or 443), tls or Tls(), proxy)

    @property
    def socket_path(self) -> str | None:
        """The path of a Unix socket; None = it is reached over TCP."""
        return self[0] if self[0].startswith("/") else None

    def __str__(self) -> str:
        if self.socket_path is not None:
            return f"unix:{self.socket_path}"
        return f"[{self[0]}]:{self[1]}" if ":" in self[0] else f"{self[0]}:{self[1]}"

    @property
    def url(self) -> str:
        """`http[s]://host:port` or `unix:/path`."""
        if self.socket_path is not None:
            return str(self)
        return f"{'http' if self[2] is None else 'https'}://{self}"

    @property
    def host_field(self) -> str:
        """The value of Host; for a Unix socket `localhost`, as clients of such servers send it."""
        if self.socket_path is not None:
            return "localhost"
        name = None if self[2] is None else self[2].server_name  # where name and Host differ, servers respond with 421
        return str(self) if name is None else f"{name}:{self[1]}"
