# SPDX-License-Identifier: Apache-2.0
"""Dialling, as far as it does not depend on names, TLS or proxies."""

from __future__ import annotations

import pytest

from lbproxy.core.requests.retry import UpstreamError
from lbproxy.driver.pulse import Pulse
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.origin import Origin
from tests.support.aio import run
from tests.support.garbage import left_by
from tests.support.ports import free_port


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_a_refused_connection_leaves_nothing_to_the_garbage_collector(plain: bool) -> None:
    """A thousand endpoints that refuse are dialled two hundred times a second: with a frame, its exception and its
    traceback in a cycle each time, collections took most of the time for which the event loop was held up.
    """

    async def main() -> None:
        pool, origin = ConnectionPool(Pulse()), Origin.parse(f"http://127.0.0.1:{free_port()}")

        async def dial() -> None:
            with pytest.raises(UpstreamError):
                await pool.connect(origin, 5.0)

        assert await left_by(dial) == 0
        pool.close()

    run(main(), plain=plain)
