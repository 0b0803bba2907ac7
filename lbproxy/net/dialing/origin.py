"""Where a connection leads to. Not in pool.py, which is compiled: a compiled class cannot be a tuple."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from lbproxy.core.endpoints.credentials import Proxy, Tls


class Origin(tuple[str, int, Tls | None, Proxy | None]):
    """Where a connection leads to: host, port, how its certificate is judged (None: it speaks no TLS), and the proxy
    that it goes through (None: there is none).

    Of a Unix socket: its absolute path, which no host looks like, and port 0.
    """

    __slots__ = ()

    def __new__(cls, address: tuple[str, int], tls: Tls | None = None, proxy: Proxy | None = None) -> Origin:
        """From host (without brackets) and port."""
        return super().__new__(cls, (address[0], address[1], tls, proxy))

    @classmethod
    @lru_cache(maxsize=4096)  # once per request; URLs come from settings and discovery only
    def parse(cls, base_url: str, tls: Tls | None = None, proxy: Proxy | None = None) -> Origin:
        """From `http[s]://host[:port][/path]` or `unix:/path/of/socket`. `tls`: of an https URL; None = the usual."""
        if base_url.startswith("unix:"):
            return cls((base_url.removeprefix("unix:"), 0))
        url = urlsplit(base_url)
        assert url.hostname is not None, "settings and discovery let no other URL through"
        if url.scheme != "https":
            return cls((url.hostname, url.port or 80), None, proxy)
        return cls((url.hostname, url.port or 443), tls or Tls(), proxy)

    @property
    def socket_path(self) -> str | None:
        """Of a Unix socket; None = it is reached over TCP."""
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
        """What stands in Host: of a Unix socket, as clients of such servers write it, `localhost`."""
        if self.socket_path is not None:
            return "localhost"
        name = None if self[2] is None else self[2].server_name  # where name and Host differ, servers answer 421
        return str(self) if name is None else f"{name}:{self[1]}"
