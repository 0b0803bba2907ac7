# SPDX-License-Identifier: Apache-2.0
"""What there is one of at each server's address, for as long as its block runs: a prober, a scraper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Of = TypeVar("Of")


class ByAddress(Generic[Of]):
    """What there is one of at each address while its block runs."""

    def __init__(self) -> None:
        self._by_url: dict[str, Of] = {}

    def get(self, url: str) -> Of | None:
        """None: there is none now."""
        return self._by_url.get(url)

    @contextmanager
    def kept(self, url: str, one: Of) -> Iterator[None]:
        """For the duration of the block. A later one at the same address stays when an earlier one's block ends."""
        self._by_url[url] = one
        try:
            yield
        finally:
            if self._by_url.get(url) is one:
                del self._by_url[url]
