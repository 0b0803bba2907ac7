# SPDX-License-Identifier: Apache-2.0
"""A DNS server of which a test decides every answer, over UDP and TCP on one port of 127.0.0.1.

    async with DnsServer({"vllm.test": Says(a=["10.0.0.1"])}) as server:
        settings = f"dns: {{nameservers: ['{server.address}']}}"
        server.zone["vllm.test"] = Says(rcode="SERVFAIL")

A name that is not in the zone does not exist. As real servers do, it cuts an answer that is too long for UDP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

MAX_UDP_BYTES = 512
MAX_TCP_BYTES = 65535


@dataclass(frozen=True)
class Says:
    """What is answered about a name."""

    a: Sequence[str] = ()
    """Sent as they are: duplicates too."""
    aaaa: Sequence[str] = ()
    srv: Sequence[str] = ()
    """Each as `priority weight port target.`"""
    cname: str | None = None
    rcode: str = "NOERROR"
    v6_rcode: str | None = None
    """Instead, for AAAA."""
    delay_s: float = 0.0
    silent: bool = False
    garbage: bool = False
    ttl: int = 0


class DnsServer:
    """Listens on a free port. `zone`: names in lower case, without the last dot."""

    def __init__(self, zone: dict[str, Says] | None = None) -> None:
        self.zone = zone or {}
        self.queries: list[str] = []
        """Each as `udp A vllm.test`."""
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> DnsServer:
        loop = asyncio.get_running_loop()
        for _ in range(20):
            self._tcp = await asyncio.start_server(self._serve_tcp, "127.0.0.1", 0)
            self.port = self._tcp.sockets[0].getsockname()[1]
            with contextlib.suppress(OSError):  # somebody has this port for UDP
                self._udp, _ = await loop.create_datagram_endpoint(
                    lambda: _Datagrams(self), local_addr=("127.0.0.1", self.port)
                )
                return self
            self._tcp.close()
        raise AssertionError("no port is free for both TCP and UDP")

    async def __aexit__(self, *_: object) -> None:
        self._tcp.close()
        self._udp.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def asked(self, kind: str) -> int:
        """How many questions began with `kind`, such as `udp AAAA`."""
        return sum(query.startswith(f"{kind} ") for query in self.queries)

    async def answer(self, wire: bytes, transport: str) -> bytes | None:
        """The answer to a question; None = silence."""
        query = dns.message.from_wire(wire)
        question = query.question[0]
        kind = dns.rdatatype.to_text(question.rdtype)
        name = question.name.to_text(omit_final_dot=True)
        self.queries.append(f"{transport} {kind} {name}")
        says = self.zone.get(name.lower(), Says(rcode="NXDOMAIN"))
        await asyncio.sleep(says.delay_s)
        if says.silent:
            return None
        if says.garbage:
            return wire[:2] + b"\xff" * 40
        response = dns.message.make_response(query)
        rcode = says.v6_rcode if kind == "AAAA" and says.v6_rcode else says.rcode
        response.set_rcode(dns.rcode.from_text(rcode))
        if rcode == "NOERROR":
            if says.cname is not None:
                response.answer.append(dns.rrset.from_text(question.name, says.ttl, "IN", "CNAME", f"{says.cname}."))
                question = dns.rrset.RRset(dns.name.from_text(says.cname), question.rdclass, question.rdtype)
                says = self.zone.get(says.cname, Says())
            addresses = {"A": says.a, "AAAA": says.aaaa, "SRV": says.srv}.get(kind, ())
            response.answer += [dns.rrset.from_text(question.name, says.ttl, "IN", kind, one) for one in addresses]
            if says.cname is not None:
                response.answer.append(dns.rrset.from_text(question.name, says.ttl, "IN", "CNAME", f"{says.cname}."))
        if transport == "tcp":
            return response.to_wire(max_size=MAX_TCP_BYTES)
        return response.to_wire(max_size=MAX_UDP_BYTES, prefer_truncation=True)

    def received(self, wire: bytes, address: tuple[str, int]) -> None:
        async def reply() -> None:
            answer = await self.answer(wire, "udp")
            if answer is not None:
                self._udp.sendto(answer, address)

        task = asyncio.ensure_future(reply())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                wire = await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
                answer = await self.answer(wire, "tcp")
                if answer is not None:
                    writer.write(len(answer).to_bytes(2) + answer)
        writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._server.received(data, addr)
