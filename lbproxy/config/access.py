"""Settings of who may do what: the secrets that callers prove themselves with.

A secret's text is read, made a digest, and forgotten: nothing that is done with a settings tree (printing, comparing,
dumping) can show it. What is refused under a key that holds secrets is not repeated in the error (`text.is_secret`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from lbproxy.config.clients import Address
from lbproxy.config.values import expected

MIN_SECRET_CHARS = 16
"""A digest without salt is as good as a salted one where nobody can guess: 16 random letters and digits are 95 bits."""
MAX_SECRET_CHARS = 512
_SECRET = re.compile(rf"[!-~]{{{MIN_SECRET_CHARS},{MAX_SECRET_CHARS}}}")
_DIGEST = re.compile(r"sha256:([0-9A-Fa-f]{64})")
WANTED_SECRET = f"{MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} visible ASCII characters, or sha256: and 64 hex digits"


@dataclass(frozen=True, slots=True)
class Secret:
    """A key or a token, known by its SHA-256 digest alone."""

    digest: bytes = field(repr=False)

    @classmethod
    def read(cls, value: object) -> Secret:
        """From its text, or from `sha256:` and the hexadecimal digest. Raises PydanticCustomError without the text."""
        if isinstance(value, Secret):
            return value
        if not isinstance(value, str):
            raise expected(f"a secret: {WANTED_SECRET} (quote it if YAML reads it as a number)")
        if (ready := _DIGEST.fullmatch(value)) is not None:
            return cls(bytes.fromhex(ready[1]))
        if value.startswith("sha256:") or _SECRET.fullmatch(value) is None:
            raise expected(f"a secret: {WANTED_SECRET}")
        return cls(digest_of(value.encode("ascii")))

    def is_in(self, text: bytes) -> bool:
        """Whether `text` is the secret. Takes the same time whatever is wrong with it."""
        return hmac.compare_digest(digest_of(text), self.digest)

    def __str__(self) -> str:
        return "***"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.read, serialization=core_schema.to_string_ser_schema())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        return {"type": "string"}


def digest_of(text: bytes) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(text).digest()


class AdminSettings(Address):
    """Where lbproxy shows itself: `host:port`, or a mapping."""

    token: Secret | None = None
    """What everything but /healthz, /readyz and /metrics asks for, as `Authorization: Bearer TOKEN`; 16 to 512
    characters, or its `sha256:` digest. null = all else answers this machine only."""
