# SPDX-License-Identifier: Apache-2.0
"""Settings of who may do what: the secrets that callers prove themselves with.

A secret's text is read, made a digest, and forgotten: nothing that is done with a settings tree (printing, comparing,
dumping) can show it. What is refused under a key that holds secrets is not repeated in the error (`text.is_secret`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from lbproxy.config.section import Section, ShortSection
from lbproxy.config.sections.clients import Address
from lbproxy.config.text import ConfigError
from lbproxy.config.values import ReadFromText, expected, if_given, read_host, rule

MIN_SECRET_CHARS = 16
"""A digest without salt is as good as a salted one where nobody can guess: 16 random letters and digits are 95 bits."""
MAX_SECRET_CHARS = 512
_SECRET = re.compile(rf"[!-~]{{{MIN_SECRET_CHARS},{MAX_SECRET_CHARS}}}")
_DIGEST = re.compile(r"sha256:([0-9A-Fa-f]{64})")
WANTED_SECRET = f"{MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} visible ASCII characters, or sha256: and 64 hex digits"


@dataclass(frozen=True, slots=True)
class Secret(ReadFromText):
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


def digest_of(text: bytes) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(text).digest()


class AdminSettings(Address):
    """Address of the admin listener: `host:port`, or a mapping."""

    token: Secret | None = None
    """Required by all but /healthz, /readyz and /metrics, as `Authorization: Bearer TOKEN`: 16 to 512 characters, or
    its `sha256:` digest. null = open to this machine, and changes need a token that lbproxy makes."""


class TlsSettings(Section):
    """HTTPS instead of HTTP. Both files are read again when they change."""

    cert: str
    """PEM file with the certificate and the intermediate ones."""
    key: str
    """PEM file with its private key, without a passphrase."""

    @field_validator("cert", "key", mode="after")
    @classmethod
    def _check_path(cls, value: str) -> str:
        return check_path(value)


MAX_ALLOWED_HOSTS = 100


class ListenSettings(Address):
    """Where clients connect: `host:port`, or a mapping."""

    allowed_hosts: Annotated[tuple[str, ...], Field(json_schema_extra={"maxItems": MAX_ALLOWED_HOSTS})] = ()
    """Where lbproxy listens on loopback without keys, only these names in Host are served, and localhost, *.localhost
    and loopback addresses; and only web pages of `cors`."""
    tls: TlsSettings | None = None
    """The certificate for HTTPS. null = plain HTTP."""

    @field_validator("allowed_hosts", mode="after")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_ALLOWED_HOSTS:
            raise expected(f"at most {MAX_ALLOWED_HOSTS} hosts")
        hosts = [read_host(one) for one in value]
        if None in hosts:
            raise expected("names or addresses in a list, without ports, such as [llm.example]")
        return tuple(host.strip("[]").removesuffix(".") for host in hosts if host is not None)


def check_path(value: str) -> str:
    """The path of a file, which nobody looks for yet. Raises PydanticCustomError."""
    if not value or "\0" in value:
        raise expected("the path of a file")
    return value


MAX_KEYS = 10_000
_KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY_LINE = re.compile(rf"(?:({_KEY_NAME.pattern}):[ \t]+)?(\S+)")


class KeySettings(ShortSection):
    """One API key: its text, or a mapping."""

    name: str = ""
    """Its name in logs: 1 to 64 letters, digits and `._-`; two keys may share one. Default: `key-` and its position."""
    key: Secret
    """16 to 512 characters that `Authorization: Bearer KEY` can carry, or `sha256:` and their digest."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return value if isinstance(value, dict | KeySettings) else {"key": value}

    _check_name = rule(
        "name",
        "a name of 1 to 64 letters, digits and ._-",
        lambda name, _: name and not _KEY_NAME.fullmatch(name),
    )


class AuthSettings(Section):
    """Who may send requests."""

    keys: tuple[KeySettings, ...] = ()
    """API keys, of which each request to `listen` must have one. None here and no `file` = no key is needed."""
    file: str | None = None
    """A file with more keys, at least one, read again when it changes; relative to lbproxy's working directory."""

    @field_validator("keys", mode="after")
    @classmethod
    def _named(cls, value: tuple[KeySettings, ...]) -> tuple[KeySettings, ...]:
        named = tuple(one.model_copy(update={"name": one.name or f"key-{n}"}) for n, one in enumerate(value, 1))
        if len({one.key for one in named}) < len(named):
            raise expected("each key once")
        return named

    _check_path = field_validator("file", mode="after")(if_given(check_path))


def read_key_file(text: str, *, source: str) -> list[KeySettings]:
    """The keys in a file's text: a `NAME: KEY` in each line, or a key alone; empty lines and those with # are nothing.

    Raises ConfigError, which names lines by their numbers and repeats nothing of them.
    """
    keys: list[KeySettings] = []
    lines: dict[bytes, int] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        match = _KEY_LINE.fullmatch(content)
        try:
            if "sha256:" in content and (match is None or match[1] == "sha256"):
                raise expected("sha256: and 64 hex digits at once, and nothing after them")
            if match is None or (not match[1] and ":" in content and not content.startswith("sha256:")):
                raise expected("NAME: KEY, with a space after the colon")
            key = Secret.read(match[2])
        except PydanticCustomError as error:
            problems.append(f"line {number}: {error.message()}")
            continue
        if key.digest in lines:
            problems.append(f"line {number}: expected each key once, but line {lines[key.digest]} has this one too")
        lines.setdefault(key.digest, number)
        keys.append(KeySettings(name=match[1] or f"key-{len(keys) + 1}", key=key))
    if not keys and not problems:
        problems.append("the file has no key")
    if len(keys) > MAX_KEYS:
        problems.append(f"expected at most {MAX_KEYS} keys, got {len(keys)}")
    if problems:
        raise ConfigError(source, problems)
    return keys
