# SPDX-License-Identifier: Apache-2.0
"""The API keys of clients, and the check of a request's credentials. Pure.

A key is looked up by its SHA-256 digest, in a dict. The time of the look-up reveals nothing about any key: bytes are
compared only if the hash of a guess's digest, with a random seed of this process, equals that of a key's. How many of
them agree is about digests, and using that requires inverting SHA-256. The time to compute the digest depends on the
length of the guess, which an attacker knows. So a look-up is as safe as comparing with every key in constant time, and
takes as long for many keys as for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.handshake import KEY_IN_PROTOCOL

_FIELD = rb"(?i:authorization:[ \t]*bearer +|x-api-key:[ \t]*|%b)" % re.escape(KEY_IN_PROTOCOL)
_ONE_KEY = re.compile(rb"%b([!-~]{1,512})[ \t]*\r\n(?:%b\1[ \t]*\r\n)*" % (_FIELD, _FIELD))
"""One key, in however many field lines (Claude Code sends two): of different ones, lbproxy and a server behind it might
each use another."""


SEVERAL: Final = (
    "The request has several credentials that are not the same valid API key: send one, as `Authorization: Bearer KEY` "
    "(an SDK's `api_key`), or as Anthropic's SDKs do."
)


class KeyRing:
    """The keys of all clients. Immutable; a reload makes another."""

    def __init__(self, names: Mapping[bytes, str]) -> None:
        """`names`: the name of the key with each SHA-256 digest."""
        self._names = dict(names)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> set[str]:
        """Of all keys."""
        return set(self._names.values())

    def name_of(self, credentials: bytes) -> str:
        """The name of the key in a request's credentials (RequestFields). Raises LbError UNAUTHORIZED."""
        found = _ONE_KEY.fullmatch(credentials)
        name = None if found is None else self._names.get(sha256(found[1]).digest())
        if name is None:
            raise LbError(Outcome.UNAUTHORIZED, SEVERAL if credentials.count(b"\r\n") > 1 else None)
        return name
