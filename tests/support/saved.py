# SPDX-License-Identifier: Apache-2.0
"""State files, as lbproxy would have written them."""

from __future__ import annotations

import time
from pathlib import Path

from lbproxy.core.saved.reading import encode
from tests.support.pool import pool_of


def write_state(file: Path, *, saved_at: float | None = None) -> Path:
    """The state of an lbproxy with one endpoint that has learned nothing yet."""
    balancer, _ = pool_of(1, policy="adaptive")
    steps = balancer.restarts.save(saved_at=time.time() if saved_at is None else saved_at, prefixes=True, now=0.0)
    file.write_bytes(b"".join(encode(piece) for piece in steps if piece is not None))
    return file
