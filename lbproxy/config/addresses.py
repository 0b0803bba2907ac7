# SPDX-License-Identifier: Apache-2.0
"""Addresses on the command line: `HOST:PORT` and `http://HOST:PORT` say the same, wherever one is asked for.
`unix:/PATH` says where the admin listener is.

The functions are types for argparse: what they raise ends the command with this text and exit code 2.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from urllib.parse import SplitResult, urlsplit

from lbproxy.config.shown import without_values

ADMIN = "127.0.0.1:9901"
"""The admin listener, unless the settings say another."""
LISTEN = "127.0.0.1:8080"
FORMS = "HOST:PORT or http://HOST:PORT"
ADMIN_FORMS = "HOST:PORT, http://HOST:PORT or unix:/PATH"


def url(text: str) -> str:
    """Where something listens that is asked: `http://host:port`, or the URL as it was given, https and paths too; or
    `unix:/path`.
    """
    if text.startswith("unix:"):
        from lbproxy.config.values import read_unix_url  # noqa: PLC0415 - imports pydantic: lbproxy.commands.cli

        unix = read_unix_url(text)
        if unix is None:
            raise ArgumentTypeError(f"expected unix: and the absolute path of a socket, got {without_values(text)!r}")
        return unix
    parts = _parts(text)
    if parts.scheme:
        return text
    if parts.port is None or parts.path:
        raise _unreadable(text)
    return f"http://{parts.netloc}"


def listener(text: str) -> str:
    """Where something of ours is to listen: `host:port`."""
    parts = _parts(text)
    if parts.port is None or parts.path not in {"", "/"} or parts.scheme == "https":
        raise _unreadable(text)
    return parts.netloc


def _parts(text: str) -> SplitResult:
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        known = parts.scheme in {"", "http", "https"} and parts.hostname and (parts.port is None or parts.port >= 0)
    except ValueError:
        known = False
    if (
        not known
        or parts.username is not None
        or parts.query
        or parts.fragment
        or not text.isprintable()
        or " " in text
    ):
        raise _unreadable(text)
    return parts


def _unreadable(text: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"expected {FORMS}, such as {ADMIN}, got {without_values(text)!r}")
