# SPDX-License-Identifier: Apache-2.0
"""A short form of T10's many answers that are nearly right."""

from __future__ import annotations

import uvloop

from tests.conformance.mutants import run


def test_answers_that_are_nearly_right_end_in_one_clear_way() -> None:
    figures = uvloop.run(run(400, seed=1))
    assert figures["lost"] == []
    assert figures["in flight"] == 0
    assert not {"hangs", "more than one answer"} & set(figures)
    for end in ("whole", "502", "cut"):
        assert isinstance(figures[end], int), "all three ends are met"
