# SPDX-License-Identifier: Apache-2.0
"""Which addresses are listened on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from lbproxy.config.sections.clients import Address
from lbproxy.net.listening.bind import bind
from lbproxy.net.listening.inherit import Inherited
from tests.support.aio import run


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_two_colons_are_every_address_of_both_kinds() -> None:
    """`[::]` was IPv6 alone, unlike in most servers. A successor takes the sockets of both."""

    async def main() -> None:
        sockets = await bind("::", 0)
        try:
            port = sockets[0].getsockname()[1]
            for host in ("127.0.0.1", "::1"):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
            inherited = Inherited([("listen", sock) for sock in sockets])
            assert await inherited.take("listen", Address(host="::", port=port)) == sockets
        finally:
            for sock in sockets:
                sock.close()

    run(main())
