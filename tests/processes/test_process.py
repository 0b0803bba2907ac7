# SPDX-License-Identifier: Apache-2.0
"""What the process asks of Python."""

from __future__ import annotations

import gc

from lbproxy.processes.process import COLLECT_AFTER


def test_a_collection_of_young_objects_looks_at_a_bounded_number() -> None:
    """A thousand endpoints that join are 100,000 objects: one that looked at all of them would hold up requests."""
    looked_at: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] < 2:
            looked_at.append(sum(len(gc.get_objects(n)) for n in range(info["generation"] + 1)))

    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(note)
    try:
        gc.set_threshold(*COLLECT_AFTER)
        kept: list[list[int]] = [[] for _ in range(500_000)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert len(kept) == 500_000
    assert len(looked_at) > 50
    assert max(looked_at) < 21_000
