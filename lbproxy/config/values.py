# SPDX-License-Identifier: Apache-2.0
"""The values that settings are made of: numbers with units, host names, URLs, paths.

Each is read in one place, bounded, and refused with a text that says what to write instead. The bounds exist because
a value out of range (a scrape every microsecond, a timeout of a year) is a typing error, not a wish.
"""

from __future__ import annotations

import ipaddress
import math
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import (
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    SecretStr,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from lbproxy.config.shown import without_values

T = TypeVar("T")


def expected(what: str) -> PydanticCustomError:
    """The error to raise for a value that is not `what`; the report adds the path and what was there instead."""
    return PydanticCustomError("expected", "expected {what}", {"what": what})


def rule(field: str, what: str, breaks: Callable[[Any, Callable[..., Any]], object]) -> Any:
    """A validator of a field of a Section: `what` is expected, and `breaks` says whether a value is none, by it and by
    the values of the fields before, which it gets as `dict.get` returns them: those that are wrong are missing.
    """

    def check(value: object, info: ValidationInfo) -> object:
        if breaks(value, info.data.get):
            raise expected(what)
        return value

    return field_validator(field, mode="after")(check)


def if_given(read: Callable[[T], T]) -> Callable[[T | None], T | None]:
    """The same for a value that may be null."""
    return lambda value: None if value is None else read(value)


# --- Numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quantity:
    """Annotates a number that may be written with a unit. The bounds are written as a user would write them.

    The attribute holds the number in the unit whose factor is 1: seconds, bytes, or just a count.
    """

    at_least: str
    at_most: str
    what: str
    units: tuple[tuple[str, str], ...] = ()
    whole: bool = True
    words: tuple[tuple[str | int, float], ...] = ()
    """What else may be written, and the number that it stands for."""

    @property
    def wanted(self) -> str:
        """What a user is told to write."""
        return f"{self.what} from {self.at_least} to {self.at_most}"

    def read(self, value: object) -> float | int:
        """The number that `value` means; raises PydanticCustomError if it is none, or out of range."""
        number = self._number(value)
        for word, meant in self.words:
            if (value if isinstance(word, str) else number) == word:
                return meant
        if number is None or not self._bound(self.at_least) <= number <= self._bound(self.at_most):
            raise expected(self.wanted)
        return int(number) if self.whole else number

    def _number(self, value: object) -> float | None:
        number: float
        if isinstance(value, str):
            match = re.fullmatch(r"(-?[0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", value.strip())
            factor = match and dict(self.units, **{"": "1"}).get(match[2])
            if not match or not factor:
                return None
            number = float(Decimal(match[1]) * Decimal(factor))  # 9 * 0.001 would not be 0.009
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18:
            number = float(value)
        else:
            return None
        return number if not self.whole or number.is_integer() else None

    def _bound(self, written: str) -> float:
        number = self._number(written)
        assert number is not None, f"{written} is no bound"
        return number

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        written = "[0-9]+" if self.whole else r"[0-9]+(\.[0-9]+)?"
        if self.units:
            written = rf"[0-9]+(\.[0-9]+)? ?({'|'.join(unit for unit, _ in self.units)})?"
        sign = "-?" if self._bound(self.at_least) < 0 else ""
        words = [word for word, _ in self.words]
        return {
            "anyOf": [
                *([{"enum": words}] if len(words) > 1 else [{"const": word} for word in words]),
                {
                    "type": "integer" if self.whole else "number",
                    "minimum": self._bound(self.at_least),
                    "maximum": self._bound(self.at_most),
                },
                {"type": "string", "pattern": rf"^{sign}{written}$|\$\{{"},
            ]
        }


class ReadFromText:
    """A value that settings write as a text: a subclass reads it, and `str` shows what may be shown of it."""

    __slots__ = ()

    @classmethod
    def read(cls, value: object) -> object:
        """From its text, or the value itself. Raises PydanticCustomError."""
        raise NotImplementedError

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.read, serialization=core_schema.to_string_ser_schema())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        return {"type": "string"}


_SECONDS = (("ms", "0.001"), ("s", "1"), ("m", "60"), ("h", "3600"))


def duration(at_least: str, at_most: str) -> Quantity:
    """Seconds. Bounds keep a typing error from becoming a busy loop or a wait without end."""
    return Quantity(at_least, at_most, "a duration (250ms, 2s, 5m, 1h, or seconds)", _SECONDS, whole=False)


def size(at_least: str, at_most: str) -> Quantity:
    """Bytes."""
    units = (("KiB", "1024"), ("MiB", "1048576"), ("GiB", "1073741824"))
    return Quantity(at_least, at_most, "a size (64KiB, 2MiB, 1GiB, or bytes)", units)


def count(at_least: str, at_most: str) -> Quantity:
    """A whole number."""
    return Quantity(at_least, at_most, "a whole number")


_SPLIT_WORDS = (("priced", -1.0), ("always", 0.0), ("never", math.inf))
SplitRule: TypeAlias = Annotated[
    float, Quantity("1", "10000000", "priced, always, never, or a number of tokens", words=_SPLIT_WORDS)
]
"""Tokens of a prompt above which it is split; -1 = where it costs less, infinite = never."""


def split_rule(tokens: float) -> str:
    """How a file would have it."""
    return next((word for word, number in _SPLIT_WORDS if number == tokens), f"{tokens:g}")


CountOrAuto: TypeAlias = Annotated[int, Quantity("1", "64", "auto, or a whole number", words=(("auto", 0),))]
"""Of worker processes, or data-parallel ranks; 0 = auto."""
Interval: TypeAlias = Annotated[float, duration("10ms", "1h")]
"""Seconds between two turns of something periodic."""
Keepalive: TypeAlias = Annotated[
    float, Quantity("1s", "10m", "0, or a duration (2s, 5m, or seconds)", _SECONDS, whole=False, words=((0, 0.0),))
]
"""Seconds of silence after which something is sent; 0 = never."""
Timeout: TypeAlias = Annotated[float, duration("1ms", "24h")]
"""Seconds until something is given up."""


MAX_MODEL_CHARS = 256


def check_model_name(name: str) -> str:
    """The name of a model, if it can be one."""
    if not 0 < len(name) <= MAX_MODEL_CHARS or not name.isprintable():
        raise expected(f"the name of a model: 1 to {MAX_MODEL_CHARS} printable characters")
    return name


def check_token(value: SecretStr) -> SecretStr:
    """What stands after `Authorization: Bearer`, if it can."""
    if not re.fullmatch(r"[!-~]{1,1024}", value.get_secret_value()):
        raise expected("1 to 1024 printable ASCII characters without spaces")
    return value


# --- Addresses --------------------------------------------------------------------------------------------------------

_HTTP_URL = re.compile(
    r"(?P<scheme>(?i:https?))://(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,254})(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>(?:/[!\"$-~]*)?)"  # printable ASCII without "#"; user and password are not accepted anywhere
)
DEFAULT_PORTS = {"http": 80, "https": 443}
ShownUrl: TypeAlias = Annotated[str, PlainSerializer(without_values, return_type=str, when_used="json")]
"""A URL or path whose query may be a secret: shown without it."""
PATH = re.compile(r"/(?!/)[!\"$-~]{0,1023}")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"  # with "_", which compose's service names have
_NAME = re.compile(rf"(?=.{{1,254}}$){_LABEL}(?:\.{_LABEL})*\.?")


def read_host(text: str) -> str | None:
    """A host in its one normal form: lower case, IPv6 compressed and in brackets. None if `text` is no host."""
    if text.startswith("[") and text.endswith("]"):
        try:
            return f"[{ipaddress.IPv6Address(text[1:-1])}]"
        except ValueError:
            return None
    if not _NAME.fullmatch(text):
        return None
    if text.rstrip(".").rpartition(".")[2].isdigit():  # no top-level domain is a number: it means an IPv4 address
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            return None
    return text.lower()


def read_origin(url: str, *, root_only: bool = False) -> str | None:
    """The normalised `http://host:port` or `https://host:port` of a URL; port 80 or 443 if it says none.

    None if the text is not one, or, with `root_only`, if it has a path.
    """
    match = _HTTP_URL.fullmatch(url)
    host = read_host(match["host"]) if match else None
    if match is None or host is None or (root_only and match["path"] not in ("", "/")):
        return None
    scheme = match["scheme"].lower()
    port = int(match["port"] or DEFAULT_PORTS[scheme])
    return f"{scheme}://{host}:{port}" if 1 <= port <= 65535 else None


def read_base_url(url: str) -> str | None:
    """The normalised `http[s]://host:port[/prefix]` of a URL without a query, and without `/` at its end.

    None if the text is not one, or its path has empty or dot segments.
    """
    origin, match = read_origin(url), _HTTP_URL.fullmatch(url)
    if origin is None or match is None:
        return None
    path = match["path"].rstrip("/")
    return origin + path if re.fullmatch(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~@:+=-]{1,128}){0,8}", path) else None


def read_dns_url(url: str) -> str | None:
    """The normalised `dns+http://name:port` (or https) of a URL; None if it is none, or has an address for a name."""
    origin = read_origin(url[4:], root_only=True) if url[:4].lower() == "dns+" else None
    return None if origin is None or read_nameserver(origin.rpartition("/")[2]) else f"dns+{origin}"


def read_srv_url(url: str) -> str | None:
    """The normalised `srv+http://name` (or https) of a URL without a port, which SRV says; None if it is none."""
    match = re.fullmatch(r"(?i:srv\+(https?))://([^/:\[\]]+)/?", url)
    host = None if match is None else read_host(match[2])
    return None if match is None or host is None or read_nameserver(host) else f"srv+{match[1].lower()}://{host}"


def read_socket_path(path: str) -> str | None:
    """The one normal form of the path of a Unix socket; None if there can be none: its address has 108 bytes, one of
    them a NUL (unix(7)).
    """
    if re.fullmatch(r"/[!-~]{1,106}", path) is None:  # also stands in URLs, log lines and fields
        return None
    normal = posixpath.normpath(re.sub("^/+", "/", path))
    return normal if normal != "/" else None


def read_unix_url(url: str) -> str | None:
    """The normalised `unix:/path` of `unix:/path` or `unix:///path`; None if it is none."""
    path = read_socket_path(url[5:]) if url.startswith("unix:") else None
    return None if path is None else f"unix:{path}"


def read_nameserver(text: str) -> str | None:
    """An IP address with or without a port (IPv6 with a port in brackets) as `ip:port`; port 53 if it says none."""
    match = re.fullmatch(r"([0-9.]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?", text)
    host, port = (match[1], int(match[2] or 53)) if match else (f"[{text}]", 53)
    host = read_host(host) or ""
    return f"{host}:{port}" if host and 1 <= port <= 65535 else None


def hosts_overlap(one: str, other: str) -> bool:
    """Whether a listener on one host takes the other's connections too. Hosts without brackets, normalised."""
    hosts = {"127.0.0.1" if host == "localhost" else host for host in (one, other)}
    if len(hosts) == 1:
        return True
    if "0.0.0.0" in hosts:  # noqa: S104 (recognised, not bound)
        return not any(":" in host for host in hosts)
    return "::" in hosts and all(":" in host for host in hosts)
