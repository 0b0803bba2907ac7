# SPDX-License-Identifier: Apache-2.0
"""The model against measured rows: closed-loop clients, H100, vLLM, in virtual time.

The rows are NVIDIA AIConfigurator's measurements. How their clients were phased is unknown, so the time to first token
is not judged; end-to-end time and time per output token are.
"""

import heapq
import random
from dataclasses import dataclass
from statistics import fmean

from lbproxy.sim.engine.engine import Engine, SimRequest
from lbproxy.sim.engine.presets import PRESETS


@dataclass(frozen=True)
class Row:
    preset: str
    prompt: int
    output: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float

    @property
    def e2e_ms(self) -> float:
        return self.ttft_ms + (self.output - 1) * self.tpot_ms


def rows(preset: str, prompt: int, output: int, measured: dict[int, tuple[float, float]]) -> list[Row]:
    return [Row(preset, prompt, output, concurrency, *figures) for concurrency, figures in measured.items()]


QWEN_TP2 = "qwen-32b-2xh100"
QWEN_TP4 = "qwen-32b-4xh100"
LLAMA_70B = "llama-70b-fp8-4xh100"
ROWS = [
    *rows(QWEN_TP2, 1024, 1024, {8: (154, 15.9), 16: (187, 17.4), 32: (237, 20.1), 64: (381, 26.1), 128: (652, 37.8)}),
    *rows(QWEN_TP2, 1024, 128, {8: (154, 18.0), 32: (250, 29.4), 128: (692, 80.3)}),
    *rows(QWEN_TP2, 4096, 1024, {8: (749, 17.9), 16: (840, 21.9), 32: (979, 29.3), 64: (4376, 52.6)}),
    *rows(QWEN_TP2, 4096, 1024, {128: (58753, 55.2)}),
    *rows(QWEN_TP2, 4096, 128, {8: (742, 26.3), 32: (1062, 75), 64: (1357, 140)}),
    *rows(QWEN_TP4, 1024, 1024, {8: (130, 10.6), 32: (178, 13.7), 128: (413, 25.6)}),
    *rows(QWEN_TP4, 4096, 1024, {8: (423, 11.8), 32: (574, 18.7), 128: (1355, 46.4)}),
    *rows(LLAMA_70B, 1024, 1024, {4: (81, 11.8), 16: (121, 13.2), 64: (256, 19.5)}),
    *rows(LLAMA_70B, 8192, 1024, {4: (453, 13.3), 16: (732, 21.1), 64: (1745, 53.5)}),
]


def simulate(row: Row, *, rounds: int, seed: int) -> tuple[float, float, float]:
    """Mean (TTFT, TPOT, E2E) in ms, without the first two rounds, of clients that start spread over one request."""
    rng = random.Random(seed)
    engine = Engine(PRESETS[row.preset], rng=rng)
    starts = [rng.uniform(0, row.e2e_ms / 1000) for _ in range(row.concurrency)]
    heapq.heapify(starts)
    sent: list[float] = []
    first: dict[int, float] = {}
    results: list[tuple[float, float, float]] = []

    def send(now: float) -> None:
        engine.add(SimRequest(str(len(sent)), row.prompt, row.output), now=now)
        sent.append(now)

    while len(results) < rounds * row.concurrency:
        due = engine.next_event()
        if starts and (due is None or starts[0] <= due):
            send(heapq.heappop(starts))
            continue
        assert due is not None
        for step in engine.advance(now=due):
            for begun in step.first:
                first[int(begun.id)] = step.at
            for ended in map(int, step.finished):
                ttft, e2e = first[ended] - sent[ended], step.at - sent[ended]
                results.append((ttft * 1e3, (e2e - ttft) * 1e3 / (row.output - 1), e2e * 1e3))
                send(step.at)
    ttfts, tpots, e2es = zip(*results[2 * row.concurrency :], strict=True)
    return fmean(ttfts), fmean(tpots), fmean(e2es)


def errors(row: Row, *, rounds: int = 4) -> tuple[float, float]:
    """Relative error of (E2E, TPOT), with their sign; printed with the TTFT for `pytest -s`."""
    ttft, tpot, e2e = simulate(row, rounds=rounds, seed=1)
    e2e_error, tpot_error = e2e / row.e2e_ms - 1, tpot / row.tpot_ms - 1
    print(
        f"{row.preset} {row.prompt}/{row.output} c{row.concurrency}: TTFT {ttft:.0f} ({row.ttft_ms:.0f}) ms, "
        f"TPOT {tpot:.1f} ({row.tpot_ms}) ms {tpot_error:+.1%}, E2E {e2e:.0f} ({row.e2e_ms:.0f}) ms {e2e_error:+.1%}"
    )
    return e2e_error, tpot_error


def test_qwen_row_with_8_clients_is_within_10_percent() -> None:
    assert max(map(abs, errors(ROWS[0], rounds=6))) <= 0.10


def test_qwen_row_with_64_clients_is_within_10_percent() -> None:
    assert max(map(abs, errors(ROWS[3], rounds=6))) <= 0.10


def test_mean_error_over_all_measured_rows_is_within_10_percent() -> None:
    measured = [errors(row) for row in ROWS]
    means = [fmean(abs(error) for error in column) for column in zip(*measured, strict=True)]
    print(f"{len(ROWS)} rows: mean absolute error of E2E {means[0]:.1%}, of TPOT {means[1]:.1%}")
    assert max(means) <= 0.10
