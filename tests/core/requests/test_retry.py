# SPDX-License-Identifier: Apache-2.0
"""What follows a failed attempt, rule by rule, and the budget."""

from __future__ import annotations

import random

import pytest

from lbproxy.config.sections.routing import RetrySettings
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.retry import (
    BACKOFF_MAX_S,
    WINDOW_S,
    FailureKind,
    Retries,
    may_fall_back,
    started,
    status_failure,
)

K = FailureKind


def retries(**settings: float) -> Retries:
    return Retries(RetrySettings.model_validate(settings), random.Random(1))


@pytest.mark.parametrize(
    ("kind", "earlier", "again"),
    [
        (K.CONNECT, (), True),
        (K.CONNECT, (K.CONNECT,), True),
        (K.CONNECT, (K.CONNECT, K.CONNECT), False),  # three attempts in all
        (K.RESET, (), True),
        (K.RESET, (K.CONNECT,), True),
        (K.RESET, (K.RESET,), False),
        (K.PROTOCOL, (), True),
        (K.PROTOCOL, (K.PROTOCOL,), False),
        (K.TIMEOUT, (), False),
        (K.EXHAUSTED, (), False),
        (K.BUSY, (K.BUSY,), True),
        (K.LIMITED, (), True),
        (K.LIMITED, (K.LIMITED,), False),
        (K.ERROR, (), True),
        (K.ERROR, (K.ERROR,), False),
        (K.ERROR, (K.CONNECT,), True),  # one server is dead, one drains: the third gets it
        (K.ERROR, (K.BUSY,), True),
        (K.ERROR, (K.RESET,), False),
        (K.ERROR, (K.BUSY, K.GATEWAY), False),
        (K.ERROR, (K.BUSY, K.CONNECT), False),
        (K.GATEWAY, (K.GATEWAY,), True),
        (K.LATE, (), False),
        (K.LATE, (K.BUSY,), False),
    ],
)
def test_the_rules(kind: FailureKind, earlier: tuple[FailureKind, ...], again: bool) -> None:
    assert retries().decide(kind, earlier, others_available=True, now=0.0).retry is again


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((409, 503, 529), K.BUSY),
        ((429,), K.LIMITED),
        ((502,), K.GATEWAY),
        ((504, 524, 598), K.LATE),
        ((500, 507, 520, 521, 522, 530, 599), K.ERROR),
        ((400, 404), K.MISSING),
        ((501, 505, 508, 511), None),  # this request, or this path, cannot be served so
        ((200, 204, 304, 401, 413, 422, 499, 600, 999), None),
    ],
)
def test_a_status_is_a_failure_by_its_class(statuses: tuple[int, ...], kind: FailureKind | None) -> None:
    """RFC 9110, section 15: a status that is not known is as the first of its class."""
    assert {status_failure(one, own_key=False, is_inference=True) for one in statuses} == {kind}
    if 409 not in statuses:
        assert {status_failure(one, own_key=False, is_inference=False) for one in statuses} == {kind}
    else:
        assert status_failure(409, own_key=False, is_inference=False) is None, "it may be about what the client made"


@pytest.mark.parametrize("kind", [one for one in K if one is not K.STALE])
def test_another_model_is_asked_after_what_may_be_repeated_and_never_else(kind: FailureKind) -> None:
    """What had not started is asked of any number of models; what may have been the request's doing once more."""
    never = {K.TIMEOUT, K.LATE, K.EXHAUSTED}
    not_started = {K.CONNECT, K.BUSY, K.LIMITED, K.MISSING, K.TOO_LONG, K.REFUSED, K.FORBIDDEN}
    assert may_fall_back((), repeatable=False)
    assert may_fall_back((kind,), repeatable=True) is (kind not in never)
    assert may_fall_back((kind,), repeatable=False) is (kind in not_started)
    assert may_fall_back((kind,) * 5, repeatable=True) is (kind in not_started | {K.GATEWAY, K.STRANDED})
    assert may_fall_back((K.RESET, kind), repeatable=True) is (kind not in never | {K.RESET, K.ERROR})
    assert started((kind, K.RESET, K.BUSY)) == ((K.RESET,) if kind in not_started else (kind, K.RESET))


@pytest.mark.parametrize("kind", [K.ERROR, K.GATEWAY, K.RESET, K.STRANDED, K.LATE])
def test_what_must_not_run_twice_is_repeated_only_if_it_did_not_begin(kind: FailureKind) -> None:
    assert not retries().decide(kind, (), others_available=True, now=0.0, repeatable=False).retry


@pytest.mark.parametrize("kind", [K.RESET, K.BUSY, K.LIMITED, K.ERROR, K.GATEWAY])
def test_nobody_else_means_no_retry(kind: FailureKind) -> None:
    it = retries()
    before = it.budget(now=0.0)
    assert not it.decide(kind, (), others_available=False, now=0.0).retry
    assert it.budget(now=0.0) == before


def test_only_a_failed_connect_is_tried_again_at_once_and_for_free() -> None:
    it = retries(budget_ratio=0, budget_per_second=0)
    verdict = it.decide(K.CONNECT, (), others_available=False, now=0.0)
    assert (verdict.retry, verdict.delay_s) == (True, 0.0)
    verdict = it.decide(K.RESET, (), others_available=True, now=0.0)
    assert (verdict.retry, verdict.outcome) == (False, Outcome.UPSTREAM_RESET)


def test_who_can_connect_to_nobody_is_told_that_there_is_nobody() -> None:
    """503 with Retry-After, as when there was nobody to try; that it had attempts left, or not, is chance."""
    it, tried = retries(), (K.CONNECT, K.CONNECT)
    assert it.decide(K.CONNECT, tried, others_available=False, now=0.0).outcome is Outcome.NO_ENDPOINTS
    assert it.decide(K.CONNECT, tried, others_available=True, now=0.0).outcome is Outcome.CONNECT_FAILED


def test_the_budget_is_a_share_of_recent_requests_and_a_rate() -> None:
    it = retries(budget_ratio=0.2, budget_per_second=1)
    for _ in range(100):
        it.count_request(now=5.0)
    assert it.budget(now=5.0) == 20 + WINDOW_S
    granted = sum(it.decide(K.BUSY, (), others_available=True, now=6.0).retry for _ in range(100))
    assert granted == 20 + WINDOW_S
    assert it.budget(now=5.0 + WINDOW_S) == pytest.approx(-20.0), "the requests are too old, the retries are not"
    assert it.budget(now=6.0 + WINDOW_S) == WINDOW_S
    assert it.budget(now=1e6) == WINDOW_S


def test_time_that_stands_still_or_seems_to_go_back_loses_nothing() -> None:
    it = retries(budget_ratio=1, budget_per_second=0)
    it.count_request(now=100.9)
    it.count_request(now=100.9)
    assert it.budget(now=99.0) == 2


def test_waiting_grows_and_stays_bounded() -> None:
    it = retries(attempts=10, budget_per_second=100_000)
    longest = [
        max(it.decide(K.BUSY, (K.BUSY,) * n, others_available=True, now=0.0).delay_s for _ in range(200))
        for n in range(8)
    ]
    assert longest == sorted(longest)[: len(longest)] or max(longest) <= BACKOFF_MAX_S
    assert 0.02 < longest[0] <= 0.025
    assert 0.2 < longest[-1] <= BACKOFF_MAX_S
