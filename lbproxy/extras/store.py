# SPDX-License-Identifier: Apache-2.0
"""What replicas need of a store that all of them reach. Knows no library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

DAYS_KEPT: Final = 400


class StoreError(Exception):
    """The store cannot be used now. The text says why, on one line."""


class Store(Protocol):
    """Streams of batches, one for each replica, and who lives. Every call is bounded in time and raises StoreError."""

    async def append(self, replica: str, batch: bytes) -> None:
        """Append one batch to the stream of a replica."""

    async def last(self, replica: str) -> bytes:
        """The position of the newest batch of a replica."""

    async def read(self, positions: Mapping[str, bytes]) -> list[tuple[str, bytes, bytes]]:
        """Wait some time for batches of these replicas after these positions: replica, position, batch."""

    async def beat(self, replica: str, info: bytes) -> tuple[dict[str, bytes], list[str]]:
        """Say that a replica lives. Returns those that live, each with its info, and those that want its knowledge."""

    async def leave(self, replica: str) -> None:
        """Say that a replica is gone."""

    async def want(self, of: str, replica: str) -> None:
        """Ask a replica for what it knows."""

    async def give(self, to: str, data: bytes) -> None:
        """Give a piece of that to the one who asked."""

    async def receive(self, replica: str) -> bytes | None:
        """The next piece; None if there is none yet."""

    async def keep_day(self, name: str, use: bytes) -> None:
        """Keep who used how many tokens in a day, for `DAYS_KEPT` days. `name`: the day, as 2026-11-29, and more."""

    async def days(self, first: str) -> list[bytes]:
        """What all replicas, also those that are gone, kept of this day and later ones."""

    async def ping(self) -> dict[str, bytes]:
        """Try all that the other calls do, without being a replica. Returns those that live, each with its info."""

    async def close(self) -> None:
        """Let go of all connections."""
