# SPDX-License-Identifier: Apache-2.0
"""Validates saved data, which is not trusted: the one place that decides what of it may reach the balancer.

A `Reader` takes the pieces of `core.saved.pieces` one by one and raises `SavedError` at the first that is wrong. What
it returns at the end is complete: every number is finite and within its limits, every name and reference is valid, and
nothing is larger than its bound. A value that is wrong but possible is not found; what engines report overrules it. In
a file each piece is a line of JSON.
"""

from __future__ import annotations

import re
from binascii import Error, a2b_base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, TypeAlias, TypeVar

import orjson

from lbproxy.core.capacity.allowance import Use
from lbproxy.core.capacity.bucket import SLOTS, Spent
from lbproxy.core.knowledge.learning import Samples
from lbproxy.core.requests.request import DayUse, Tokens
from lbproxy.core.saved.pieces import (
    FORMAT,
    MAX_AMOUNT,
    MAX_ENDS,
    MAX_KEYS,
    MAX_NAMES,
    MAX_NODES,
    MAX_START_S,
    MAX_STARTED_AT,
    MAX_TIMES,
    MAX_WAKE_S,
    READABLE,
    VERSION,
    Durations,
    Piece,
    is_name,
    tokens_pieces,
)

Learned: TypeAlias = dict[str, dict[str, float]]
"""Numbers by group and name."""
Limits: TypeAlias = Mapping[str, tuple[float, float]]
Value = TypeVar("Value")

MAX_ENDPOINTS: Final = 4096
MAX_DAYS: Final = 4096
MAX_ROWS: Final = 4096
MAX_ID_CHARS: Final = 64
MAX_FLOWS: Final = 4096
"""Flows of which it is said what they used."""
MAX_URL_CHARS: Final = 2048
MAX_DEPTH: Final = 1 << 16
"""Blocks of one prompt."""
MAX_AGE_S: Final = 86_400.0
"""Older data is not used: fleets change."""
FUTURE_S: Final = 5.0
"""Clocks are set back by this much without notice."""
MAX_RESTORED_KEYS: Final = 20_000_000
"""Blocks of all prompts of one endpoint, shared ones as often as prompts have them: the least recently used prompts
beyond are not restored."""
KEY_BYTES: Final = 8

MS, TOKENS, COUNT, SHARE, ANY = (0.0, 1e7), (0.0, 1e18), (0.0, 1e15), (0.0, 1.0), (-1e18, 1e18)
AMOUNT = (0.0, MAX_AMOUNT)
_GAPS: Limits = {"count": COUNT, "context": TOKENS, "mean_ms": (0.0, 1e9)}
_SAMPLES: Limits = {one.name: COUNT for one in fields(Samples)}
_SIZE: Limits = {"tokens": (1.0, 1e18), "least": TOKENS}
POOL: Final[Mapping[str, Limits]] = {
    "pool": {
        "token_ms": (1e-5, 100.0),
        "base_ms": (0.5, 10_000.0),
        "output_tokens": TOKENS,
        "seen_bytes": (1e-3, 1e15),
        "seen_tokens": (1e-3, 1e15),
        "media_scale": (0.02, 20.0),
        "hit_ratio": SHARE,
        "work_tokens": TOKENS,
        "session_trust": SHARE,
        "load_again_ms": (1.0, 10_000.0),
        "load_first_ms": (1.0, 10_000.0),
    },
    "gaps": {**_GAPS, "gap_ms": MS, "gap_per_token_ms": MS, "square": (0.0, 1e18), "cov": ANY},
    "size": _SIZE,
    "samples": _SAMPLES,
}
ENDPOINT: Final[Mapping[str, Limits]] = {
    "speed": {"ln_factor": (-20.0, 20.0), "base_ms": (0.5, 10_000.0), "base_for_s": MS, "gap_for_s": MS},
    "gaps": {
        **_GAPS,
        "mean_ms": (1e-12, 1e9),
        "decode_ms": (0.0, 1e9),
        "blocks": COUNT,
        "off": (-50.0, 50.0),
        "scatter": (0.0, 1e6),
    },
    "samples": _SAMPLES,
    "size": _SIZE,
    "slots": {"limit": (1.0, 1e18), "initial_limit": (1.0, 1e18), "response_s": (1e-12, 1e7), "by_space": SHARE},
    "space": {"limit_tokens": TOKENS},
    "lanes": {"lanes": (1.0, 1e6), "delay_s": (-1e5, 1e5), "spread_s": (0.0, 1e5)},
}
"""The numbers of each group, with the lowest and the highest value."""
MAY_LACK: Final = frozenset({"slots.limit", "slots.initial_limit"})
MAY_BE_EMPTY: Final = frozenset({"gaps", "size", "slots", "space", "lanes"})
"""Parts of an endpoint that are empty if that was not learned."""
MAX_LINE_BYTES: Final = 1 << 20
"""Lines are shorter than 100 KB, unless an endpoint has a thousand adapters with long names."""


class SavedError(Exception):
    """The data cannot be used. The text says why, without any of it."""


@dataclass(slots=True)
class SavedEndpoint:
    """What was saved of one endpoint."""

    started_at: float | None
    """The start of its process, by its own clock."""
    learned: Learned
    loaded: tuple[str, ...]
    known: tuple[str, ...]
    ends: list[int] = field(default_factory=list)
    """The last nodes of the prompts in its cache, the least recently used first."""


@dataclass(slots=True)
class Saved:
    """Data that was validated."""

    saved_at: float
    """Wall time, in seconds since 1970."""
    block_bytes: int
    """0: nothing was learned."""
    pool: Learned = field(default_factory=dict)
    """Empty: the same."""
    endpoints: dict[str, SavedEndpoint] = field(default_factory=dict)
    """What was learned of endpoints, by URL."""
    parents: list[int] = field(default_factory=list)
    """For each node the one before it; -1 = none."""
    keys: list[bytes] = field(default_factory=list)
    """For each node its keys: 8 bytes each, little-endian."""
    depths: list[int] = field(default_factory=list)
    """For each node the number of keys from the beginning of the prompt to its end."""
    used: dict[str, Use] = field(default_factory=dict)
    """What was used of limits per time, by `Endpoint.key`. Times are wall times, and may be any."""
    flows: dict[str, Use] = field(default_factory=dict)
    """What was used of limits per minute, by the name of the flow."""
    sleep: dict[str, Durations] = field(default_factory=dict)
    """How long changes of phases take, by URL of the server."""

    tokens: dict[tuple[str, str], DayUse] = field(default_factory=dict)
    """Who used how many, by day and id."""

    def limits_alone(self) -> Saved:
        """What was used of limits, and nothing else."""
        return Saved(self.saved_at, 0, used=self.used, flows=self.flows)

    def forget_limits(self) -> None:
        """As if nothing had been used of limits."""
        self.used, self.flows = {}, {}

    @property
    def has_limits(self) -> bool:
        """Whether it says what any endpoint or flow used of its limits."""
        return bool(self.used or self.flows)

    def is_from_future(self, wall_now: float) -> bool:
        """Whether the clock was set back since, or is wrong."""
        return wall_now - self.saved_at < -FUTURE_S

    def age_s(self, wall_now: float) -> float:
        """Seconds since it was saved. Raises SavedError if it is too old, or from the future."""
        age_s = wall_now - self.saved_at
        if self.is_from_future(wall_now):
            raise SavedError("it was written in the future: was the clock set back?")
        if age_s > MAX_AGE_S:
            raise SavedError(f"it is {age_s / 3600.0:.0f} hours old, and at most {MAX_AGE_S / 3600.0:.0f} are allowed")
        return max(0.0, age_s)


class Reader:
    """Takes the pieces in order, then `done`."""

    def __init__(self) -> None:
        self._saved: Saved | None = None
        self._in_order: list[SavedEndpoint] = []
        self._keys = self._ends = 0
        self._is_complete = False
        self._version = VERSION

    def take(self, piece: object) -> None:
        """The next piece. Raises SavedError."""
        _require(isinstance(piece, dict) and not self._is_complete, "it is not a state file of lbproxy")
        assert isinstance(piece, dict)
        saved = self._saved
        if saved is None:
            self._saved, self._version = _head(piece)
            return
        kind = piece.get("kind")
        if kind == "pool":
            _require(not saved.pool, "it has two pools")
            saved.pool = _learned(piece.get("learned"), POOL, frozenset())
        elif kind == "endpoint":
            self._endpoint(saved, piece)
        elif kind == "nodes":
            for one in _list(piece.get("nodes")):
                self._node(saved, one)
        elif kind == "ends":
            self._add_ends(saved, piece)
        elif kind == "used":
            _put(saved.used, _url(piece.get("key")), _use(piece))
        elif kind == "flow":
            _put(saved.flows, _flow(piece.get("name")), _use_of_flow(piece), MAX_FLOWS)
        elif kind == "tokens":
            add_day(saved.tokens, piece)
        elif kind == "sleep":
            _put(saved.sleep, _url(piece.get("url")), _durations(piece))
        else:
            _require(kind == "end", "it has a piece of an unknown kind")
            self._is_complete = True

    def done(self) -> Saved:
        """All of it. Raises SavedError if the end is missing."""
        _require(self._is_complete, "its end is missing")
        assert self._saved is not None
        saved = self._saved
        may_lack = self._version > 1 and not (saved.endpoints or saved.keys)
        _require(bool(saved.pool and saved.block_bytes) or (may_lack and not saved.pool), "it has no pool")
        for endpoint in self._in_order:
            endpoint.ends = _newest(endpoint.ends, saved.depths)
        return saved

    def _endpoint(self, saved: Saved, piece: Mapping[str, object]) -> None:
        url = _url(piece.get("url"))
        started_at = piece.get("started_at")
        endpoint = SavedEndpoint(
            None if started_at is None else _number(started_at, "started_at", (-MAX_STARTED_AT, MAX_STARTED_AT)),
            _learned(piece.get("learned"), ENDPOINT, MAY_BE_EMPTY),
            _names(piece.get("loaded")),
            _names(piece.get("known")),
        )
        _put(saved.endpoints, url, endpoint)
        self._in_order.append(endpoint)

    def _node(self, saved: Saved, node: object) -> None:
        match node:
            case [int(parent), str(text)] if -1 <= parent < len(saved.depths):
                pass
            case _:
                raise SavedError("a piece of a prompt is malformed")
        try:
            keys = a2b_base64(text, strict_mode=True)
        except (Error, ValueError):  # ValueError: not ASCII
            raise SavedError("a piece of a prompt is malformed") from None
        _require(bool(keys) and not len(keys) % KEY_BYTES, "a piece of a prompt is malformed")
        count = len(keys) // KEY_BYTES
        depth = count + (0 if parent < 0 else saved.depths[parent])
        self._keys += count
        fits = depth <= MAX_DEPTH and self._keys <= MAX_KEYS and len(saved.depths) < MAX_NODES
        _require(fits, "it has too many prompts, or too long ones")
        saved.depths.append(depth)
        saved.parents.append(parent)
        saved.keys.append(keys)

    def _add_ends(self, saved: Saved, piece: Mapping[str, object]) -> None:
        number, nodes = piece.get("endpoint"), _list(piece.get("nodes"))
        known = type(number) is int and 0 <= number < len(self._in_order)
        _require(known, "a prompt is at no endpoint")
        assert isinstance(number, int)
        self._ends += len(nodes)
        _require(self._ends <= MAX_ENDS, "it has too many prompts")
        for node in nodes:
            _require(type(node) is int and 0 <= node < len(saved.depths), "a prompt has no end")
            assert isinstance(node, int)
            self._in_order[number].ends.append(node)


def _newest(ends: list[int], depths: list[int]) -> list[int]:
    """The most recently used prompts, as many as may be restored."""
    blocks = 0
    for count, end in enumerate(reversed(ends)):
        blocks += depths[end]
        if blocks > MAX_RESTORED_KEYS:
            return ends[len(ends) - count :]
    return ends


def add_day(known: dict[tuple[str, str], DayUse], piece: Mapping[str, object]) -> None:
    """Add who used how many tokens in a day. Raises SavedError."""
    day, name, rows = piece.get("day"), piece.get("id"), _list(piece.get("rows"))
    _require(isinstance(day, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", day) is not None, "a day has no date")
    _require(isinstance(name, str) and 0 < len(name) <= MAX_ID_CHARS, "a day has no id")
    use = known.setdefault((str(day), str(name)), DayUse(str(day), str(name), {}))
    _require(len(known) <= MAX_DAYS, "it has too many days")
    for row in rows:
        match row:
            case [str(flow), str(model), *counts] if len(counts) == len(Tokens._fields):
                numbers = [int(_number(count, "tokens", AMOUNT)) for count in counts]
            case _:
                raise SavedError("tokens of a flow are malformed")
        _require(len(use.rows) < MAX_ROWS and len(flow) + len(model) <= MAX_URL_CHARS, "it has too many flows")
        use.rows[flow, model] = Tokens(*numbers)


def _head(piece: Mapping[str, object]) -> tuple[Saved, int]:
    """And the version."""
    _require(piece.get("kind") == "head" and piece.get("format") == FORMAT, "it is not a state file of lbproxy")
    version = piece.get("version")
    _require(type(version) is int, "it has no version")
    assert isinstance(version, int)
    _require(version in READABLE, f"it has version {version}, and this lbproxy reads up to version {VERSION}")
    saved_at = _number(piece.get("saved_at"), "saved_at", COUNT)
    size = piece.get("block_bytes")
    return Saved(saved_at, 0 if size is None else int(_number(size, "block_bytes", (1.0, 1e9)))), version


def _url(found: object) -> str:
    """What names an endpoint or a server."""
    _require(isinstance(found, str) and 0 < len(found) <= MAX_URL_CHARS, "an endpoint has no URL")
    assert isinstance(found, str)
    return found


def _flow(found: object) -> str:
    """The name of a flow."""
    _require(is_name(found), "a flow has no name")
    return str(found)


def _put(known: dict[str, Value], key: str, value: Value, most: int = MAX_ENDPOINTS) -> None:
    _require(key not in known and len(known) < most, "it has too many endpoints or flows")
    known[key] = value


def _use(piece: Mapping[str, object]) -> Use:
    at, day_at = _number(piece.get("at"), "used.at", COUNT), piece.get("day_at")
    requests = _number(piece.get("requests"), "used.requests", AMOUNT)
    tokens = _number(piece.get("tokens"), "used.tokens", AMOUNT)
    amounts = _numbers(piece.get("day"), "used.day", AMOUNT, SLOTS)
    return Use(at, requests, tokens, None if day_at is None else Spent(_number(day_at, "used.day_at", COUNT), amounts))


def _use_of_flow(piece: Mapping[str, object]) -> Use:
    requests = _number(piece.get("requests"), "flow.requests", AMOUNT)
    tokens = _number(piece.get("tokens"), "flow.tokens", AMOUNT)
    return Use(_number(piece.get("at"), "flow.at", COUNT), requests, tokens, None)


def _durations(piece: Mapping[str, object]) -> Durations:
    return Durations(
        _numbers(piece.get("wakes"), "sleep.wakes", (0.0, MAX_WAKE_S), MAX_TIMES),
        _numbers(piece.get("sleeps"), "sleep.sleeps", (0.0, MAX_WAKE_S), MAX_TIMES),
        _numbers(piece.get("starts"), "sleep.starts", (0.0, MAX_START_S), MAX_TIMES),
    )


def _numbers(found: object, name: str, limits: tuple[float, float], most: int) -> tuple[float, ...]:
    numbers = _list(found)
    _require(len(numbers) <= most, f"{name}: at most {most} numbers are allowed")
    return tuple(_number(number, name, limits) for number in numbers)


def _learned(found: object, wanted: Mapping[str, Limits], may_be_empty: frozenset[str]) -> Learned:
    _require(isinstance(found, dict) and found.keys() == wanted.keys(), "learned values are missing, or unknown")
    assert isinstance(found, dict)
    return {group: _group(found[group], group, limits, may_be_empty) for group, limits in wanted.items()}


def _group(found: object, group: str, limits: Limits, may_be_empty: frozenset[str]) -> dict[str, float]:
    _require(isinstance(found, dict), f"{group}: expected numbers by name")
    assert isinstance(found, dict)
    if not found and group in may_be_empty:
        return {}
    missing = {name for name in limits if f"{group}.{name}" not in MAY_LACK} - found.keys()
    _require(not missing and found.keys() <= limits.keys(), f"{group}: values are missing, or unknown")
    return {name: _number(value, f"{group}.{name}", limits[name]) for name, value in found.items()}


def _number(found: object, name: str, limits: tuple[float, float]) -> float:
    """A finite number within limits: comparisons with NaN are false."""
    fits = type(found) in {int, float} and limits[0] <= found <= limits[1]  # type: ignore[operator]
    _require(fits, f"{name}: expected a number from {limits[0]:g} to {limits[1]:g}")
    return float(found)  # type: ignore[arg-type]


def _names(found: object) -> tuple[str, ...]:
    names = _list(found)
    _require(len(names) <= MAX_NAMES and all(map(is_name, names)), "names of adapters are malformed")
    return tuple(str(name) for name in names)


def _list(found: object) -> list[object]:
    _require(isinstance(found, list), "expected a list")
    assert isinstance(found, list)
    return found


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise SavedError(problem)


def encode(piece: Piece) -> bytes:
    return orjson.dumps(piece, option=orjson.OPT_APPEND_NEWLINE)


def day_lines(use: DayUse) -> bytes:
    """One day alone, as `add_day` reads it."""
    return b"".join(map(encode, tokens_pieces([use])))


def read_lines(lines: Iterable[bytes]) -> Saved:
    """Validate data. Raises SavedError."""
    reader = Reader()
    for line in lines:
        if len(line) > MAX_LINE_BYTES:
            raise SavedError("a line is too long")
        try:
            piece = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise SavedError("it is damaged, or not a state file of lbproxy") from None
        reader.take(piece)
    return reader.done()
