# SPDX-License-Identifier: Apache-2.0
"""A provider's limits a minute, and how they are said."""

from math import inf

import pytest

from lbproxy.sim.mock.serving.provider import Quota, charged_tokens, duration, quota


def test_a_refused_request_is_not_charged_by_either_limit() -> None:
    limits = quota(10, 100)
    assert limits.take(90, now=0.0) is None
    refused = limits.take(20, now=0.0)
    assert refused is not None
    assert (refused.kind, refused.limit, refused.used, refused.requested) == ("tokens", 100, 90, 20)
    assert refused.wait_s == pytest.approx(6.0)
    assert limits.headers(now=0.0) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "6s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "10",
        "x-ratelimit-reset-tokens": "54s",
    }
    assert limits.take(20, now=refused.wait_s) is None


def test_what_exceeds_a_whole_minute_never_fits() -> None:
    refused = quota(None, 100).take(101, now=0.0)
    assert refused is not None
    assert refused.wait_s == inf


def test_without_limits_nothing_is_refused_or_said() -> None:
    assert Quota().take(10**9, now=0.0) is None
    assert Quota().headers(now=0.0) == {}


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, 25),
        ({"max_tokens": 5}, 30),
        ({"max_tokens": 5, "max_completion_tokens": 50}, 75),
        ({"max_tokens": -5}, 25),
        ({"max_tokens": "many"}, 25),
        ({"max_tokens": True}, 25),
        ({"max_tokens": None}, 25),
    ],
)
def test_charge_is_the_prompt_and_the_most_that_may_come(fields: dict[str, object], tokens: int) -> None:
    assert charged_tokens(fields, 100) == tokens


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.1199, "120ms"), (1.0, "1s"), (1.5, "1.5s"), (60.0, "1m0s"), (72.5, "1m12.5s"), (360.0, "6m0s")],
)
def test_durations_are_worded_as_the_headers_are(seconds: float, text: str) -> None:
    assert duration(seconds) == text
