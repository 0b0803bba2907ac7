# SPDX-License-Identifier: Apache-2.0
"""Who used how many tokens, over restarts and over the end of a day."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbproxy.control.saving.state_file import read
from lbproxy.control.saving.usage_file import MAX_DAYS, append_usage, read_usage, rows_of
from lbproxy.core.requests.request import DayUse, Tokens
from lbproxy.core.saved.reading import SavedError, encode, read_lines
from tests.control.saving.test_keeper import Kept
from tests.support.aio import run

PAIR = ("team", "m")
OLD = DayUse("2026-01-01", "old", {PAIR: Tokens(1, 2, 3)})


def test_the_present_day_survives_a_kill_and_an_ended_one_is_appended_once(tmp_path: Path) -> None:
    file = tmp_path / "state"
    first = Kept(file)
    ledger = first.balancer.ledger
    ledger.turn(OLD.day, OLD.id)
    ledger.add(*PAIR, Tokens(1, 2, 3))
    run(first.keeper.restore())  # it looks at the clock: that day is over
    ledger.add(*PAIR, Tokens(10, 20, 30, 4, 5))
    run(first.keeper.write())
    assert read_usage(f"{file}.usage") == [OLD]
    (today,) = read(str(file)).tokens.values()
    assert today.rows == {PAIR: Tokens(10, 20, 30, 4, 5)}
    first.keeper.release()  # as if it was killed: the kernel lets go of the lock
    second = Kept(file)
    run(second.keeper.restore())
    second.balancer.ledger.add(*PAIR, Tokens(1))
    second.balancer.ledger.ended.append(OLD)  # the one before died before it noted that this was appended
    kept, uses = run(second.keeper.usage())
    assert kept
    assert {use.day: use.rows[PAIR] for use in uses} == {OLD.day: OLD.rows[PAIR], today.day: Tokens(11, 20, 30, 4, 5)}
    run(second.keeper.write())
    assert read_usage(f"{file}.usage") == [OLD]
    assert second.balancer.ledger.ended == []


def test_a_balancer_process_goes_on_with_what_the_one_before_counted(tmp_path: Path) -> None:
    first, second = Kept(tmp_path / "state"), Kept(tmp_path / "state")
    run(first.keeper.restore())
    run(first.keeper.write())
    first.balancer.ledger.add(*PAIR, Tokens(7))
    second.keeper.counted = read_lines(run(first.keeper.count()).splitlines(keepends=True))
    run(second.keeper.restore())
    assert second.balancer.ledger.today() == first.balancer.ledger.today()


def test_who_handed_over_adds_what_its_last_requests_use_and_the_successor_counts_apart(tmp_path: Path) -> None:
    """Whichever of the two writes last."""
    file = tmp_path / "state"
    old, new = Kept(file), Kept(file)
    new.keeper.has_predecessor = True
    run(old.keeper.restore())
    old.balancer.ledger.add(*PAIR, Tokens(1))
    run(old.keeper.write())
    run(new.keeper.restore())
    new.balancer.ledger.add(*PAIR, Tokens(10))
    old.balancer.ledger.add(*PAIR, Tokens(100))
    old.keeper.hand_over()
    run(old.keeper.write())
    run(new.keeper.write())
    assert rows_of(run(new.keeper.usage())[1], 2)[0]["prompt_uncached"] == 111
    old.balancer.ledger.add(*PAIR, Tokens(1000))
    run(old.keeper.stop())
    assert rows_of(run(new.keeper.usage())[1], 2)[0]["prompt_uncached"] == 1111
    run(new.keeper.stop())
    third = Kept(file)
    run(third.keeper.restore())
    assert third.balancer.ledger.today() == new.balancer.ledger.today()
    assert rows_of(run(third.keeper.usage())[1], 2)[0]["prompt_uncached"] == 1111


def test_old_days_are_dropped_and_a_damaged_line_costs_its_day(tmp_path: Path) -> None:
    path = str(tmp_path / "usage")
    dates = [f"{2020 + n // 336}-{n // 28 % 12 + 1:02}-{n % 28 + 1:02}" for n in range(450)]
    days = [DayUse(date, "x", {PAIR: Tokens(n)}) for n, date in enumerate(dates)]
    append_usage(path, days)
    assert read_usage(path) == days[-MAX_DAYS:]
    text = Path(path).read_text().splitlines(keepends=True)
    Path(path).write_text("".join([text[0][:9] + "\n", '{"day":"x"}\n', "[]\n", *text[1:]]))
    assert read_usage(path) == days[-MAX_DAYS + 1 :]


@pytest.mark.parametrize("row", [["f", "m", 1, 2, 3], ["f", 1, 1, 2, 3, 4, 5], ["f", "m", 1, 2, 3, 4, -1], 7])
def test_hostile_tokens_are_refused(row: object) -> None:
    head = {"kind": "head", "format": "lbproxy state", "version": 2, "saved_at": 1.0, "block_bytes": None}
    piece = {"kind": "tokens", "day": "2026-11-29", "id": "x", "rows": [row]}
    with pytest.raises(SavedError):
        read_lines([encode(head), encode(piece), encode({"kind": "end"})])


def test_rows_of_a_day_are_added_and_the_largest_come_first() -> None:
    uses = [DayUse("9999-01-01", one, {PAIR: Tokens(1, 0, 2, 1, 0), ("big", ""): Tokens(9)}) for one in "ab"]
    uses.append(DayUse("2020-01-01", "a", {PAIR: Tokens(1)}))
    counts = {"prompt_uncached": 2, "prompt_cached": 0, "completion": 4, "estimated": 2}
    first, second = rows_of(uses, 30)
    assert (first["flow"], first["model"], first["prompt_uncached"]) == ("big", None, 18)
    assert second == {"day": "9999-01-01", "flow": "team", "model": "m", **counts}
