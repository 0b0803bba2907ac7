# SPDX-License-Identifier: Apache-2.0
"""What a sequence number says about the messages between."""

from __future__ import annotations

from lbproxy.core.engines.kv_events import SILENT_S, KvOrder, KvSequence


def orders(*numbers: int) -> list[KvOrder]:
    sequence = KvSequence()
    return [sequence.judge(b"t", number, 0.0) for number in numbers]


def test_each_number_is_the_next_of_the_one_before() -> None:
    assert orders(7, 8, 9) == [KvOrder.FIRST, KvOrder.NEXT, KvOrder.NEXT]


def test_a_larger_number_is_a_gap_and_a_smaller_one_a_restart() -> None:
    assert orders(7, 9, 10, 0, 1, 1) == [
        *(KvOrder.FIRST, KvOrder.GAP, KvOrder.NEXT, KvOrder.RESTART, KvOrder.NEXT),
        KvOrder.RESTART,  # publishers do not repeat themselves: it published two and started again
    ]


def test_a_second_publisher_is_not_mixed_in() -> None:
    """Two engines that connect to one port of ours would look like a restart with each message."""
    sequence = KvSequence()
    assert sequence.judge(b"a", 5, 0.0) is KvOrder.FIRST
    assert sequence.judge(b"b", 0, SILENT_S - 1.0) is KvOrder.FOREIGN
    assert sequence.judge(b"a", 6, SILENT_S - 1.0) is KvOrder.NEXT
    assert sequence.judge(b"b", 7, SILENT_S) is KvOrder.FOREIGN


def test_a_successor_with_another_topic_is_accepted_once_the_first_is_silent() -> None:
    sequence = KvSequence()
    sequence.judge(b"a", 5, 0.0)
    assert sequence.judge(b"b", 6, SILENT_S) is KvOrder.RESTART
    assert sequence.judge(b"b", 7, SILENT_S) is KvOrder.NEXT
