# SPDX-License-Identifier: Apache-2.0
"""`lbproxy demo`: three simulated vLLM servers and lbproxy before them, in one process, without settings or GPU.

With `--disaggregated` they are two prefill and two decode servers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from lbproxy.config.addresses import ADMIN
from lbproxy.config.parse import parse
from lbproxy.control.admin.made_token import FOLDER, dashboard_link, file_name, read_token
from lbproxy.demo.taken import program
from lbproxy.processes import app
from lbproxy.processes.control import Text
from lbproxy.processes.supervisor import supervise, worker_count
from lbproxy.sim.mock.http import MockOptions, MockServer

SERVERS = ("sim-1", "sim-2", "sim-3")
APART = ("prefill-1", "prefill-2", "decode-1", "decode-2")
"""Each begins with its role."""
CONNECTOR: Final = "nixl"
SPLIT_ABOVE = 1000
"""Tokens of a prompt. By price, nothing would be split on servers that are idle: nothing is gained there."""
MODEL = "demo"


async def run_demo(
    listen: str, admin: str, stop: asyncio.Event, *, workers: int = 1, disaggregated: bool = False
) -> None:
    """Run until `stop` is set; prints what to paste. Raises OSError if an address is taken.

    `workers`: how many worker processes relay; 1 = everything in this process. `disaggregated`: prefill and decode are
    apart.
    """
    servers = {name: MockServer(_options(name)) for name in (APART if disaggregated else SERVERS)}
    folder = tempfile.mkdtemp(prefix="lbproxy-demo-")
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = folder
    try:
        for server in servers.values():
            await server.start()
        endpoints = "\n".join(
            f"  - {{url: '{server.url}', name: {name}{_role(name)}}}" for name, server in servers.items()
        )
        split = f"routing: {{split: {SPLIT_ABOVE}}}\n" if disaggregated else ""
        text = (
            f"listen: '{listen}'\nadmin: '{admin}'\nlog: {{access: false, level: warning}}\n{split}"
            f"drain: {{lame_duck: 0s}}\nworkers: {workers}\nendpoints:\n{endpoints}\n"
        )
        invite = partial(_invite, disaggregated, folder)
        settings = parse(text, environ={}, source="demo")
        if worker_count(settings) > 1:
            await supervise(settings, Text(text, "demo"), orders=app.Orders(stop), on_ready=invite)
        else:
            await app.serve(settings, orders=app.Orders(stop), on_ready=invite)
    finally:
        for server in servers.values():
            await server.close()
        os.environ.pop(FOLDER)
        if before is not None:
            os.environ[FOLDER] = before
        shutil.rmtree(folder, ignore_errors=True)


def _options(name: str) -> MockOptions:
    match name.partition("-")[0]:
        case "prefill" | "decode" as role:
            return MockOptions(model=MODEL, role=role, connector=CONNECTOR)
        case _:
            return MockOptions(model=MODEL)


def _role(name: str) -> str:
    """The settings of the endpoint that has to do with it."""
    return f", role: {name.partition('-')[0]}, connector: {CONNECTOR}" if name in APART else ""


def _invite(disaggregated: bool, folder: str, at: app.Listening) -> None:
    """`folder`: that of the admin token."""
    assert at.admin_url is not None
    path = os.path.join(folder, file_name(urlsplit(at.admin_url).port or 0))
    page = dashboard_link(at.admin_url, read_token(path))
    print(_invitation_apart(at, page) if disaggregated else _invitation(at, page), flush=True)  # noqa: T201


def _invitation_apart(at: app.Listening, page: str) -> str:
    """The same, where prefill and decode are apart."""
    return f"""\
lbproxy is at {at.url}, with simulated vLLM servers: 2 for prefill and 2 for decode. Ctrl-C stops it.
Prompts with more than {SPLIT_ABOVE:,} uncached tokens are split: `routing.split: {SPLIT_ABOVE}`. The default, `priced`,
splits a request where that costs less, which needs servers that are busy. In another shell, try a long prompt

    curl -s -o /dev/null -D - {at.url}/v1/completions -H 'Content-Type: application/json' \\
      -d "{{\\"model\\": \\"{MODEL}\\", \\"max_tokens\\": 20, \\"prompt\\": \\"$(seq -s ' ' 4000)\\"}}"

whose response says `x-lbproxy-prefill` and `x-lbproxy-endpoint`; send it again, and it is served whole where its
prompt is cached now. Then a short one:

    curl -s -o /dev/null -D - {at.url}/v1/completions -H 'Content-Type: application/json' \\
      -d '{{"model": "{MODEL}", "max_tokens": 20, "prompt": "Hello, who are you?"}}'

Dashboard: {page}
Metrics: curl -s {at.admin_url}/metrics"""


def _commands(at: app.Listening) -> str:
    """Those that show and steer it; with its address, if that is not their default."""
    own = "" if at.admin_url == f"http://{ADMIN}" else f" --admin {at.admin_url}"
    commands = {
        "status": "the servers and how they are",
        "top": "the same, live; q quits",
        "explain": "why the last request went to its server; explain ID: any other (x-request-id)",
        f"drain {SERVERS[1]} --wait": "no new requests for this server",
        f"undrain {SERVERS[1]}": "requests for it again",
    }
    width = max(map(len, commands))
    return "\n".join(f"    {program()} {f'{one}{own}':{width + len(own)}}  # {what}" for one, what in commands.items())


def _invitation(at: app.Listening, page: str) -> str:
    """What a first user pastes."""
    return f"""\
lbproxy is at {at.url}, with {len(SERVERS)} simulated vLLM servers. Ctrl-C stops it. In another shell, try

    curl -sN {at.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
      "model": "{MODEL}", "stream": true, "max_tokens": 20,
      "messages": [{{"role": "user", "content": "Hello, who are you?"}}]}}'

or, with OpenAI's SDK (.venv/bin/python has it after `make test`; else pip install openai):

    from openai import OpenAI
    client = OpenAI(base_url="{at.url}/v1", api_key="none")
    response = client.chat.completions.with_raw_response.create(
        model="{MODEL}", max_tokens=20, messages=[{{"role": "user", "content": "Hello, who are you?"}}])
    print(response.headers["x-lbproxy-endpoint"], "responded:", response.parse().choices[0].message.content)

Dashboard: {page}
Metrics: curl -s {at.admin_url}/metrics
The servers and lbproxy are one process; README.md shows how to kill a server. Commands for another shell:

{_commands(at)}"""
