# SPDX-License-Identifier: Apache-2.0
"""What the KV events of an endpoint show of its prefix cache as a whole."""

from __future__ import annotations

from typing import Final, NamedTuple


class CacheReport(NamedTuple):
    """What happened since the report before, and what is in the cache now."""

    restarted: bool = False
    """The engine is a new process: everything that it had loaded is lost."""
    cleared: bool = False
    """The cache was cleared, and nothing else."""
    tokens: int | None = None
    """Tokens in the cache now; None = not known."""
    size_tokens: int | None = None
    """The measured size of the cache; None = not known."""


RESTARTED: Final = CacheReport(restarted=True)
