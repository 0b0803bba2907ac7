# SPDX-License-Identifier: Apache-2.0
"""What routing by loaded models is worth, in short."""

from __future__ import annotations

import pytest

from benchmarks.on_demand import CELLS, PAGE, Cell, best, main, run

SECONDS = 300.0


def test_the_page_has_what_the_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Four boxes, eight models: with what is loaded known, a load for each model, or few more."""
    assert main(["--example"]) == 0
    assert f"```text\n{capsys.readouterr().out}```\n" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("cell", CELLS[:2], ids=lambda cell: cell.title)
def test_fewer_loads_and_a_fraction_of_the_wait(cell: Cell) -> None:
    ours, least, ideal = (
        run(cell, "lbproxy", SECONDS, 1),
        run(cell, "least", SECONDS, 1),
        best(cell, SECONDS, 1, tries=2),
    )
    assert ours.failed == 0
    assert ours.mean_s < 0.2 * least.mean_s
    assert ours.loads < 0.6 * least.loads
    assert ours.mean_s < 1.6 * ideal.mean_s
