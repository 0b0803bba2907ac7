# SPDX-License-Identifier: Apache-2.0
"""Whether the demo can have its addresses, asked before anything is started, and which command line would work."""

from __future__ import annotations

import re
import shlex
import sys

from lbproxy.config.sections.clients import Address
from lbproxy.net.listening.bind import open_sockets

MAX_TRIED = 100
"""Ports after one that cannot be had."""


def program() -> str:
    """This program, as a shell of the same folder calls it."""
    return sys.argv[0] if sys.argv[0].endswith("lbproxy") else "lbproxy"


async def find_taken(listen: str, admin: str, arguments: list[str], *, count: int = 1) -> str | None:
    """What is wrong with the addresses, all at once, and a whole command line that works; None: both can be had.

    `arguments`: those of this command line. `count`: so many consecutive ports of each are needed.
    """
    wanted = {"listen": listen, "admin": admin}
    problems = {option: why for option, text in wanted.items() if (why := await _problem(option, text, count))}
    if not problems:
        return None
    used = {port for option, text in wanted.items() if option not in problems for port in _ports(text, count)}
    others: dict[str, str] = {}
    for option in problems:
        text = await _other(option, wanted[option], count, used)
        if text is None:
            return "\n".join(problems.values())
        others[option] = text
        used |= set(_ports(text, count))
    left = re.sub(f" --(?:{'|'.join(others)})(?: |=)\\S+", "", f" {shlex.join(arguments)}")
    command = " ".join([shlex.quote(program()) + left, *(f"--{option} {text}" for option, text in others.items())])
    return "\n".join([*problems.values(), f"this would work: {command}"])


def _ports(text: str, count: int) -> range:
    port = int(text.rpartition(":")[2])
    return range(port, port + count if port else port)  # 0: whichever is free


async def _problem(option: str, text: str, count: int) -> str | None:
    """Why one of its ports cannot be had; None: all can, or this is for who reads the settings to say."""
    host = text.rpartition(":")[0]
    for port in _ports(text, count):
        try:
            address = Address.model_validate(f"{host}:{port}")
        except ValueError:
            return None
        try:
            sockets = await open_sockets(address, f"--{option}")
        except OSError as error:
            return str(error)
        for sock in sockets:
            sock.close()
    return None


async def _other(option: str, text: str, count: int, used: set[int]) -> str | None:
    """The next address of this host that can be had."""
    host, _, port = text.rpartition(":")
    for other in range(int(port) + 1, min(int(port) + MAX_TRIED, 65_536 - count)):
        near = f"{host}:{other}"
        if used.isdisjoint(_ports(near, count)) and await _problem(option, near, count) is None:
            return near
    return None
