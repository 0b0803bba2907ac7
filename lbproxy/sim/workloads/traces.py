# SPDX-License-Identifier: Apache-2.0
"""Recorded traffic: the rows of published traces, their replay, and stand-ins with the same statistics.

This module is given lines and reads no file. A row that cannot be understood is an error that names its line: a replay
that silently leaves rows out is another trace.

- Mooncake (FAST '25, kvcache-ai/Mooncake, Apache-2.0): one JSON object a line with `timestamp` in ms, `input_length`,
  `output_length`, and `hash_ids`, one id for each 512 tokens of the prompt, the last one perhaps partial. Equal ids
  mean equal text *and* equal text before. Timestamps are coarse, so each arrival is moved, by the seed, to somewhere
  before the next timestamp.
- Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon, Apache-2.0): JSON lines likewise, `timestamp` in seconds, an
  id for each 16 tokens, `chat_id` and `parent_chat_id` (-1: a session begins). The ids are those of the prompt as the
  chat template has it, so there may be some more or less than `input_length` needs: the rest of a prompt is its own.
- BurstGPT (HPMLL/BurstGPT, CC-BY-4.0): CSV with a header; `Timestamp` in seconds, `Request tokens`, `Response tokens`,
  in the newest file `Session ID`. Nothing about prefixes: a request of a session with enough tokens is taken to begin
  with all that was said before. Failures have a response of 0; `BurstGPT_without_fails_*.csv` have none.
- Azure LLM inference 2023 (Splitwise, ISCA '24, CC-BY): CSV of time, context tokens, generated tokens; nothing about
  prefixes.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import orjson

from lbproxy.sim.workloads.prompts import Piece, size
from lbproxy.sim.workloads.workload import Arrival, Job, OpenLoop, fresh_ids, lognormal, poisson

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
MAX_ROWS = 6_000_000
"""The longest of the traces, BurstGPT's third, has 5,344,021; more than this is another file."""
MAX_TOKENS = 10_000_000
"""In one row: a prompt longer than any model takes is a typing error."""


class TraceError(ValueError):
    """A trace that cannot be used; says which line, and why."""


class TraceRow(NamedTuple):
    """One recorded request."""

    at_s: float
    """Since the first row."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks; empty: nothing is known of what it shares."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    session: str | None = None


def read_mooncake(lines: Iterable[str]) -> list[TraceRow]:
    """The rows of a Mooncake trace, in order of time. Raises TraceError."""
    return _read(((number, line) for number, line in enumerate(lines, 1) if line.strip()), _mooncake_row)


def read_bailian(lines: Iterable[str]) -> list[TraceRow]:
    """The rows of a Qwen-Bailian trace, in order of time. Raises TraceError."""
    sessions: dict[int, str] = {}
    """By the id of each request, in the order of the file: that of the session's first."""

    def parse(line: str) -> TraceRow:
        fields = orjson.loads(line)
        chat, parent = fields["chat_id"], fields.get("parent_chat_id", -1)
        if not isinstance(chat, int) or not isinstance(parent, int):
            raise ValueError("chat_id and parent_chat_id must be numbers")
        sessions[chat] = sessions.get(parent, str(chat))
        row = _hashed(fields, per_second=1)
        return row._replace(block_tokens=BAILIAN_BLOCK_TOKENS, session=sessions[chat])

    return _read(((number, line) for number, line in enumerate(lines, 1) if line.strip()), parse)


def read_burstgpt(lines: Iterable[str]) -> list[TraceRow]:
    """The rows of a BurstGPT trace, in order of time. Raises TraceError."""
    reader = csv.DictReader(lines)
    if not {"Timestamp", "Request tokens", "Response tokens"} <= set(reader.fieldnames or ()):
        raise TraceError("line 1: expected a header with Timestamp, Request tokens and Response tokens")
    return _read(enumerate(reader, 2), _burstgpt_row)


def read_azure(lines: Iterable[str]) -> list[TraceRow]:
    """The rows of an Azure trace, in order of time. Raises TraceError."""
    reader = csv.reader(lines)
    header = next(reader, None)
    if header != ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
        raise TraceError("line 1: expected the header TIMESTAMP,ContextTokens,GeneratedTokens")
    return _read(((number, fields) for number, fields in enumerate(reader, 2) if fields), _azure_row)


def _read(rows: Iterable[tuple[int, object]], parse: Callable[..., TraceRow]) -> list[TraceRow]:
    found: list[TraceRow] = []
    for number, row in rows:
        if len(found) == MAX_ROWS:
            raise TraceError(f"line {number}: more than {MAX_ROWS} rows")
        try:
            found.append(parse(row))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"line {number}: {type(error).__name__}: {error}") from None
    if not found:
        raise TraceError("there are no rows")
    found.sort(key=lambda row: row.at_s)
    return [row._replace(at_s=row.at_s - found[0].at_s) for row in found]


def _mooncake_row(line: str) -> TraceRow:
    row = _hashed(orjson.loads(line), per_second=1000)
    if len(row.blocks) != -(-row.prompt_tokens // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(f"{row.prompt_tokens} tokens are not {len(row.blocks)} blocks of {MOONCAKE_BLOCK_TOKENS}")
    return row


def _hashed(fields: Mapping[str, object], *, per_second: int) -> TraceRow:
    blocks, at = fields["hash_ids"], fields["timestamp"]
    prompt, output = (_tokens(fields[name], name) for name in ("input_length", "output_length"))
    if not isinstance(blocks, list) or not all(isinstance(block, int) and 0 <= block < 2**59 for block in blocks):
        raise ValueError("hash_ids must be a list of numbers")
    if not isinstance(at, int | float) or not 0 <= at < 1e12:
        raise ValueError("timestamp must be a time")
    return TraceRow(at / per_second, prompt, output, tuple(blocks))


def _burstgpt_row(fields: Mapping[str, str]) -> TraceRow:
    prompt, output = (_tokens(int(fields[name]), name) for name in ("Request tokens", "Response tokens"))
    at = float(fields["Timestamp"])
    if not 0 <= at < 1e12:
        raise ValueError("Timestamp must be a time in seconds")
    return TraceRow(at, prompt, output, session=fields.get("Session ID") or None)


def _azure_row(fields: list[str]) -> TraceRow:
    if len(fields) != 3:
        raise ValueError(f"expected 3 fields, got {len(fields)}")
    when, prompt, output = fields
    at = datetime.fromisoformat(f"{when}+00:00").timestamp()
    return TraceRow(at, _tokens(int(prompt), "ContextTokens"), _tokens(int(output), "GeneratedTokens"))


def _tokens(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be a whole number from 1 to {MAX_TOKENS}")
    return value


def replay(
    rows: Sequence[TraceRow], *, seed: int, speedup: float, max_context: int, duration_s: float | None = None
) -> OpenLoop:
    """The trace, `speedup` times as fast. Rows longer than `max_context` tokens in all are left out.

    `duration_s`: only what arrives so early, after the speeding up.
    """
    rng = random.Random(f"{seed}:replay")
    ids = fresh_ids()
    arrivals: list[Arrival] = []
    said: dict[str, tuple[Piece, ...]] = {}
    """In each session without blocks."""
    for number, (row, at) in enumerate(zip(rows, _jittered(rows, rng), strict=True)):
        answer = Piece(ids(), row.output_tokens)
        prompt = _prompt(row, said, ids)
        if row.session is not None and not row.blocks:
            said[row.session] = (*prompt, answer)
        fits = row.prompt_tokens + row.output_tokens <= max_context
        if fits and (duration_s is None or at / speedup < duration_s):
            arrivals.append((at / speedup, Job(str(number), prompt, answer, session=row.session)))
    arrivals.sort(key=lambda arrival: arrival[0])
    return OpenLoop([arrivals])


def _jittered(rows: Sequence[TraceRow], rng: random.Random) -> list[float]:
    """Each time, moved to somewhere before the next distinct one."""
    times = sorted({row.at_s for row in rows})
    after = dict(zip(times, [*times[1:], times[-1]], strict=True))
    return [rng.uniform(row.at_s, after[row.at_s]) for row in rows]


def _prompt(row: TraceRow, said: Mapping[str, tuple[Piece, ...]], ids: Callable[[], int]) -> tuple[Piece, ...]:
    if row.session is not None and not row.blocks and size(said.get(row.session, ())) < row.prompt_tokens:
        pieces = list(said.get(row.session, ()))
    else:
        starts = range(0, row.prompt_tokens, row.block_tokens)
        pieces = [
            Piece(block, min(row.prompt_tokens - start, row.block_tokens))
            for block, start in zip(row.blocks, starts, strict=False)
        ]
    own = row.prompt_tokens - size(pieces)
    return (*pieces, Piece(ids(), own)) if own else tuple(pieces)


def mooncake_like(seed: int, requests: int = 12_031, duration_s: float = 3537.0) -> list[TraceRow]:
    """Rows with the statistics of Mooncake's conversations.

    Theirs: 12,031 requests in 3,537 s, mean prompt 12,035 tokens (median 6,909, 99th percentile 85,400), mean answer
    343, of all prompt tokens 37 % known from earlier prompts, one first block for all.
    """
    rng = random.Random(f"{seed}:mooncake-like")
    rows: list[TraceRow] = []
    sessions: list[tuple[int, ...]] = []
    last = 0
    for at in poisson(rng, requests / duration_s, duration_s):
        known: tuple[int, ...] = (0,)
        going_on = bool(sessions) and rng.random() < 0.4
        if going_on:
            # Mostly a recent conversation.
            index = max(0, len(sessions) - 1 - int(rng.expovariate(1 / 150)))
            known = sessions.pop(index)
        added = lognormal(rng, 4300, 1.15, at_most=110_000)
        fresh = max(1, -(-added // MOONCAKE_BLOCK_TOKENS) - (0 if going_on else 1))
        blocks = (*known, *range(last + 1, last + 1 + fresh))
        last += fresh
        prompt = len(blocks) * MOONCAKE_BLOCK_TOKENS - rng.randrange(MOONCAKE_BLOCK_TOKENS)
        if prompt > 120_000:
            continue
        rows.append(TraceRow(at, prompt, lognormal(rng, 250, 0.8, at_most=2000), blocks))
        sessions.append(blocks if prompt % MOONCAKE_BLOCK_TOKENS == 0 else blocks[:-1])
    return rows


def azure_like(seed: int, requests: int = 19_366, duration_s: float = 3502.0) -> list[TraceRow]:
    """Rows with the statistics of Azure's conversations: mean prompt 1,155 tokens, mean answer 211; nothing shared."""
    rng = random.Random(f"{seed}:azure-like")
    return [
        TraceRow(at, lognormal(rng, 780, 0.886, at_most=16_000), lognormal(rng, 150, 0.826, at_most=1500))
        for at in poisson(rng, requests / duration_s, duration_s)
    ]
