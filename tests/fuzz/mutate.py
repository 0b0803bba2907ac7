# SPDX-License-Identifier: Apache-2.0
"""Inputs that are nearly right: a good one, changed in a few of the ways in which parsers have been fooled before.

Everything comes from a seed, and each input from its own number: `--first N --runs 1` makes one input again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

MAX_BYTES = 64 << 10
BYTES = [bytes([n]) for n in (0, 1, 9, 10, 11, 12, 13, 0x1B, 0x20, *b'"+,-.09:;=\\_{}', 0x7F, 0x80, 0xA0, 0xC3, 0xFF)]


def span(data: bytes, rng: random.Random) -> tuple[int, int]:
    """Begin and end of some bytes: mostly few."""
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 1, 2, 3, 5, 9, 40)))


def _flip(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, _end = span(data, rng)
    return data[:start] + bytes([rng.randrange(256)]) + data[start + 1 :]


def _replace(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, _end = span(data, rng)
    return data[:start] + rng.choice(BYTES) + data[start + 1 :]


def _insert(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, _end = span(data, rng)
    return data[:start] + rng.choice(BYTES) + data[start:]


def _delete(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = span(data, rng)
    return data[:start] + data[end:]


def _double(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = span(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 2, 20)) + data[end:]


def _move(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = span(data, rng)
    rest = data[:start] + data[end:]
    at = rng.randrange(len(rest) + 1)
    return rest[:at] + data[start:end] + rest[at:]


def _token(data: bytes, rng: random.Random, tokens: Sequence[bytes]) -> bytes:
    start, _end = span(data, rng)
    return data[:start] + rng.choice(tokens) + data[start:]


def _token_for(data: bytes, rng: random.Random, tokens: Sequence[bytes]) -> bytes:
    """In the place of another, if there is one."""
    old, new = rng.choice(tokens), rng.choice(tokens)
    return data.replace(old, new, 1) if old in data else _token(data, rng, tokens)


def _case(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, end = span(data, rng)
    return data[:start] + data[start:end].swapcase() + data[end:]


def _number(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    digits = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if not digits:
        return data
    at = rng.choice(digits)
    return (
        data[:at] + rng.choice((b"0", b"1", b"9", b"00", b"", b"99999999999999999999", b"-1", b"+2")) + data[at + 1 :]
    )


def _line(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    """Lines dropped, doubled or in another order."""
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return data
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.randrange(3)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(to, lines[at])
    else:
        lines[at], lines[to] = lines[to], lines[at]
    return b"".join(lines)


def _line_end(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    ends = [at for at, byte in enumerate(data) if byte == 0x0A]
    if not ends:
        return data
    at = rng.choice(ends)
    start = at - 1 if data[at - 1 : at] == b"\r" else at
    return data[:start] + rng.choice((b"\n", b"\r", b"\r\n", b"\n\r", b"\r\r\n", b"\r\n ", b"")) + data[at + 1 :]


def _cut(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


OPERATORS: list[Callable[[bytes, random.Random, Sequence[bytes]], bytes]] = [
    *(_flip, _replace, _insert, _delete, _double, _move, _token, _token, _token_for, _token_for),
    *(_case, _number, _line, _line_end, _cut),
]


def mutate(rng: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """One input. One in ten begins as the beginning of one seed and the end of another."""
    data = rng.choice(seeds)
    if rng.random() < 0.1:
        other = rng.choice(seeds)
        data = data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 6))):
        data = rng.choice(OPERATORS)(data, rng, tokens)
    return data[:MAX_BYTES]


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """The same in pieces, as a network may cut it."""
    count = rng.choice((0, 1, 1, 2, 5))
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(count))
    return [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)]) if b > a]
