# SPDX-License-Identifier: Apache-2.0
"""Long-lived loops, which outlive what goes wrong in them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

logger = logging.getLogger("lbproxy")
RESTART_FIRST_S: Final = 0.1
RESTART_MAX_S: Final = 10.0


async def supervise(name: str, run: Callable[[], Awaitable[None]], rng: random.Random) -> None:
    """Run a long-lived loop; when it raises, log that and start it again after a back-off that grows up to 10 s, and
    is short again once the loop has run for longer than that.
    """
    delay_s = RESTART_FIRST_S
    loop = asyncio.get_running_loop()
    while True:
        began_at = loop.time()
        try:
            await run()
        except Exception:
            if loop.time() - began_at > RESTART_MAX_S:
                delay_s = RESTART_FIRST_S
            logger.exception("%s failed; it starts again in about %.1f s", name, delay_s)
        else:
            return
        await asyncio.sleep(delay_s * rng.uniform(0.5, 1.5))
        delay_s = min(RESTART_MAX_S, 2 * delay_s)
