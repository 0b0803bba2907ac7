"""How an endpoint, or the proxy before it, is told who we are, and how we know that it is the right one."""

from __future__ import annotations

from typing import NamedTuple


class ApiKey:
    """A text that nothing shows: neither its repr, nor str(), nor a JSON library. Equal if the texts are."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text. For the one place that sends it."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKey) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "ApiKey(***)"


class Proxy(NamedTuple):
    """A forward proxy, through which an endpoint is reached by CONNECT."""

    host: str
    """Without brackets."""
    port: int
    credentials: ApiKey | None = None
    """What `Proxy-Authorization` says."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Tls(NamedTuple):
    """How an endpoint's certificate is judged."""

    ca: str | None = None
    """The certificates (PEM) that may have signed it; None = those that this machine trusts."""
    verify: bool = True
    """False: any certificate will do."""
    server_name: str | None = None
    """Whose it must be; sent as SNI and in Host. None = the host's of the URL."""
