# SPDX-License-Identifier: Apache-2.0
"""Credentials for an endpoint or the proxy before it, and how its certificate is verified."""

from __future__ import annotations

from typing import NamedTuple


class ApiKey:
    """A secret text that is never shown: not by repr, str() or a JSON library. Equal if the texts are."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text, for the one place that sends it."""
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiKey) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "ApiKey(***)"


class ForwardProxy(NamedTuple):
    """A forward proxy, through which an endpoint is reached by CONNECT."""

    host: str
    """Without brackets."""
    port: int
    credentials: ApiKey | None = None
    """The value of `Proxy-Authorization`."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Tls(NamedTuple):
    """How an endpoint's certificate is verified."""

    ca: str | None = None
    """The certificates (PEM) that may have signed it; None = those that this machine trusts."""
    verify: bool = True
    """False: every certificate is accepted."""
    server_name: str | None = None
    """The expected name, sent as SNI and in Host. None = the host of the URL."""
