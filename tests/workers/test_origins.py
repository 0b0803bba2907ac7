# SPDX-License-Identifier: Apache-2.0
"""What the worker leaves out of an attempt's message, the balancer process has."""

from __future__ import annotations

import random

import msgspec
import pytest

from lbproxy.core.observed.record import MAX_PATH_CHARS
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.workers import messages as m
from lbproxy.workers.origins import MAX_KEPT, NOT_KEPT, Receiving, Sending

DECODER = msgspec.msgpack.Decoder(m.FromWorker)


def attempt(number: int, path: str = "/v1/x") -> m.Submit:
    origin = "POST", path, "127.0.0.1", "chat", "key", NOT_KEPT
    return m.Submit(number, InferenceRequest(f"r{number}", "m"), 1.5, origin)


def read(sent: object) -> tuple[m.Submit, int]:
    """And its bytes."""
    data = msgspec.msgpack.encode(sent)
    message = DECODER.decode(data)
    assert isinstance(message, m.Submit)
    return message, len(data)


def test_what_was_sent_before_is_not_sent_again() -> None:
    sending, receiving = Sending(), Receiving()
    first, long = read(sending.shortened(attempt(1)))
    second, short = read(sending.shortened(attempt(2)))
    assert second.origin == 0
    assert short < long - len("/v1/x")
    for message, number in ((first, 1), (second, 2)):
        assert receiving.origin(message.origin)[:-1] == attempt(number).origin[:-1]  # type: ignore[index]
        assert message.request == InferenceRequest(f"r{number}", "m")
        assert (message.number, message.started_at, message.attempt) == (number, 1.5, None)


@pytest.mark.parametrize(
    "differs",
    [
        {"attempt": ((5,), None, True, None)},
        {"request": InferenceRequest("r", "m", max_tier=2)},
        {"request": InferenceRequest("r", "m", flow="f", deadline=0.5)},
    ],
)
def test_what_is_not_as_by_default_is_sent(differs: dict[str, object]) -> None:
    message = msgspec.structs.replace(attempt(1), **differs)
    said, _ = read(Sending().shortened(message))
    assert (said.request, said.attempt) == (message.request, message.attempt)


def test_both_agree_whatever_comes_and_memory_is_bounded() -> None:
    """More origins than are kept, in any order, some with long paths; and attempts after the first."""
    rng, sending, receiving = random.Random(1), Sending(), Receiving()
    for number in range(5000):
        size = MAX_PATH_CHARS + 1 if rng.random() < 0.05 else 1
        again = ((1,), None, False, None) if rng.random() < 0.2 else None
        message = attempt(number, f"/{min(rng.randrange(400), rng.randrange(400)) * 'x'}".ljust(size))
        message.attempt = again
        said, _ = read(sending.shortened(message))
        assert receiving.origin(said.origin)[:-1] == message.origin[:-1]  # type: ignore[index]
    assert len(receiving._kept) == len(sending._kept) == len(sending._numbers) == MAX_KEPT


def test_an_origin_that_was_never_said_is_an_error() -> None:
    with pytest.raises(KeyError):
        Receiving().origin(3)
