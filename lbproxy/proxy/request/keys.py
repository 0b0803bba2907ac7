"""The API keys that clients may have, and the check of a request's credentials. Pure.

A key is looked up by its SHA-256 digest, in a dict. How long that takes says nothing about any key: bytes are compared
only where the hash of a guess's digest, under a seed of this process, meets that of a key's, and how far they agree is
about digests: to use it is to invert SHA-256. To make the digest takes as long as the guess is long, which who guesses
knows. So a lookup is as safe as comparing with every key in constant time, and takes as long for many as for one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256

from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.handshake import KEY_IN_PROTOCOL

_ONE_KEY = re.compile(
    rb"(?i:authorization:[ \t]*bearer +|x-api-key:[ \t]*|%b)([!-~]{1,512})[ \t]*\r\n" % re.escape(KEY_IN_PROTOCOL)
)
"""Exactly one field line: of two, lbproxy and a server behind it might each take another."""


class KeyRing:
    """Who may send requests. Immutable; a reload makes another."""

    def __init__(self, names: Mapping[bytes, str]) -> None:
        """`names`: what the key with each SHA-256 digest is called."""
        self._names = dict(names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)

    def name_of(self, credentials: bytes) -> str:
        """What the key in a request's credentials (RequestFields) is called. Raises LbError UNAUTHORIZED."""
        found = _ONE_KEY.fullmatch(credentials)
        name = None if found is None else self._names.get(sha256(found[1]).digest())
        if name is None:
            raise LbError(Outcome.UNAUTHORIZED)
        return name
