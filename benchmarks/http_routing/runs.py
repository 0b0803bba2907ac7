# SPDX-License-Identifier: Apache-2.0
"""Many runs: which follows which, which go on side by side, and which are done again. All are kept as they are made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.http_routing.results import Row, keep, read
from benchmarks.http_routing.trial import Task, TrialError
from benchmarks.overhead.process import StartError

ATTEMPTS = 3
"""How often a run that is rejected is made, in all."""


def order(cells: Sequence[str], seeds: int, names: Sequence[str]) -> list[Task]:
    """All runs: for each seed of each cell, all routers one after the other, every second time backwards, so that what
    the machine does over the hours is done to all alike.
    """
    tasks = []
    for seed in range(1, seeds + 1):
        for cell in cells:
            turn = names if seed % 2 else list(reversed(names))
            tasks += [Task(cell, seed, name) for name in turn]
    return tasks


def measure(
    tasks: Sequence[Task], run: Callable[[Task, int], Row], store: Path, *, at_a_time: int, attempts: int = ATTEMPTS
) -> list[str]:
    """Do the runs that `store` does not have, those that are rejected again after all others, and keep them.

    run: does one, and says in `rejected` whether it is to be believed; its second argument is the number of the run
    among those side by side. Raises TrialError, StartError.

    Returns what failed, with the reason.
    """
    failed: dict[Task, str] = {}
    for _ in range(attempts):
        done = {(row["cell"], row["seed"], row["router"]) for row in read(store) if row["rejected"] is None}
        missing = [task for task in tasks if (task.cell, task.seed, task.router) not in done]
        failed.clear()
        left = len(missing)
        for batch in batches(missing, at_a_time):
            said = f"{left} left: {batch[0].cell}, seed {batch[0].seed}: {'; '.join(one.router for one in batch)}"
            print(said, file=sys.stderr, flush=True)
            left -= len(batch)
            with ThreadPoolExecutor(at_a_time) as pool:
                found = list(pool.map(partial(_tried, run), batch, range(at_a_time)))
            for task, row in zip(batch, found, strict=True):
                if isinstance(row, str):
                    print(f"  {task.router}: {row}", file=sys.stderr, flush=True)
                    failed[task] = row
                    continue
                keep(store, row)
                print(f"  {line(row)}", file=sys.stderr, flush=True)
                if row["rejected"] is not None:
                    failed[task] = f"rejected, {row['rejected']}"
    return [f"{task.router}, {task.cell}, seed {task.seed}: {why}" for task, why in failed.items()]


def batches(tasks: Sequence[Task], at_a_time: int) -> Iterator[list[Task]]:
    """Tasks in their order, at most so many at a time, of one cell and seed each time."""
    batch: list[Task] = []
    for task in tasks:
        if batch and (len(batch) == at_a_time or (task.cell, task.seed) != (batch[0].cell, batch[0].seed)):
            yield batch
            batch = []
        batch.append(task)
    if batch:
        yield batch


def _tried(run: Callable[[Task, int], Row], task: Task, number: int) -> Row | str:
    """A run, or why there is none."""
    try:
        return run(task, number)
    except (TrialError, StartError) as error:
        return str(error)


def line(row: Row) -> str:
    """What came of a run, for who watches."""
    figures = row["summary"]
    text = f"{row['router']}: TTFT {figures['ttft_mean']:.3f} s, p99 {figures['ttft_p99']:.2f}, "
    text += f"E2E {figures['e2e_mean']:.2f}, goodput {figures['goodput']:.2f}, hits {figures['hit_ratio']:.3f}, "
    text += f"failed {figures['failed']}, "
    if len(row["shares"]) > 1:
        text += f"shares {row['shares']}, "
    text += f"CPU s {row['router_cpu_s']:.1f} {row['servers_cpu_s']:.1f} {row['client_cpu_s']:.1f} "
    text += f"of {row['seconds']:.0f}, lag {1000 * row['server_lag_s']:.1f} / {1000 * row['client_lag_s']:.1f} ms"
    return text + (f": rejected, {row['rejected']}" if row["rejected"] else "")
