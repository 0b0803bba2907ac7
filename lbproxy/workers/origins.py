# SPDX-License-Identifier: Apache-2.0
"""Attempts that begin, in few bytes: what a link carried before, and what is as by default, is not sent again.

Method, path, client, route and key are the same in most requests of a client: they need not be decoded for each one,
nor kept as often as there are records of recent requests. The sender owns the numbers: it says by which number the
receiver is to keep an origin, so both agree whatever else is sent; a number that is said again stands for the newer
origin. Bounded by `MAX_KEPT` on both sides; an origin with a long path is not kept. A new link begins with none.
"""

from __future__ import annotations

from typing import Any, Final

from lbproxy.core.observed.record import MAX_PATH_CHARS
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.workers import messages as m
from lbproxy.workers.link import Sent

NOT_KEPT: Final = -1
MAX_KEPT: Final = 256
_SUBMIT: Final = m.Submit.__struct_config__.tag
_HEAD: Final = 7
"""The fields of an InferenceRequest that differ in most requests: from its id to its max_tokens."""
_USUAL_REST: Final[m.Fields] = tuple(InferenceRequest("", None))[_HEAD:]


class Sending:
    """The sender's end, for one link."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        """The number of each origin, as it is before it has one."""
        self._kept: list[Any] = []
        """Origins by number."""
        self._next = 0

    def shortened(self, message: m.Submit) -> Sent:
        """What is to be sent instead of `message`, whose origin is complete. It must be sent."""
        anything: Any = message  # or compiled code looks at each field of the tuples
        origin, fields = self._known(anything.origin), anything.request
        if anything.attempt is None and fields[_HEAD:] == _USUAL_REST:
            return _SUBMIT, anything.number, fields[:_HEAD], anything.started_at, origin
        return m.Submit(anything.number, anything.request, anything.started_at, origin, anything.attempt)

    def _known(self, origin: Any) -> Any:
        """Its number; or itself with the number that it will have, if any."""
        number = self._numbers.get(origin)
        if number is not None:
            return number
        if len(origin[1]) > MAX_PATH_CHARS:
            return origin
        number, self._next = self._next, (self._next + 1) % MAX_KEPT
        if number < len(self._kept):
            del self._numbers[self._kept[number]]
            self._kept[number] = origin
        else:
            self._kept.append(origin)
        self._numbers[origin] = number
        return (*origin[:-1], number)


class Receiving:
    """The receiver's end, for one link."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}

    def origin(self, said: Any) -> Any:
        """The Origin that a message says, complete or by its number. Raises KeyError."""
        if isinstance(said, int):
            return self._kept[said]
        if said[-1] != NOT_KEPT:
            self._kept[said[-1]] = said
        return said
