# SPDX-License-Identifier: Apache-2.0
"""How many objects something leaves that only the garbage collector frees."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable


async def left_by(action: Callable[[], Awaitable[None]], *, times: int = 10) -> int:
    """Objects in reference cycles that `times` calls of `action` leave. What a first call creates is not counted."""
    await action()
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(times):
            await action()
        return gc.collect()
    finally:
        if was_enabled:
            gc.enable()
