"""`lbproxy demo`: three simulated vLLM servers and lbproxy before them, in one process, without settings or GPU."""

from __future__ import annotations

import asyncio

from lbproxy import app
from lbproxy.config.parse import parse
from lbproxy.demo.taken import in_options
from lbproxy.processes.control import Text
from lbproxy.processes.supervisor import supervise, worker_count
from lbproxy.sim.mock.http import MockOptions, MockServer

SERVERS = 3
MODEL = "demo"


async def run_demo(listen: str, admin: str, stop: asyncio.Event, *, workers: int = 1) -> None:
    """Run until `stop` is set; prints what to paste. Raises OSError if an address is taken.

    `workers`: how many worker processes relay; 1 = everything in this process.
    """
    servers = [MockServer(MockOptions(model=MODEL)) for _ in range(SERVERS)]
    try:
        for server in servers:
            await server.start()
        endpoints = "\n".join(f"  - {{url: '{s.url}', name: sim-{n}}}" for n, s in enumerate(servers, 1))
        text = (
            f"listen: '{listen}'\nadmin: '{admin}'\nlog: {{access: false, level: warning}}\n"
            f"drain: {{lame_duck: 0s}}\nworkers: {workers}\nendpoints:\n{endpoints}\n"
        )
        settings = parse(text, environ={}, source="demo")
        try:
            if worker_count(settings) > 1:
                await supervise(settings, Text(text, "demo"), orders=app.Orders(stop), on_ready=_invite)
            else:
                await app.serve(settings, orders=app.Orders(stop), on_ready=_invite)
        except OSError as error:
            raise OSError(in_options(str(error))) from error
    finally:
        for server in servers:
            await server.close()


def _invite(at: app.Listening) -> None:
    print(_invitation(at), flush=True)  # noqa: T201


def _invitation(at: app.Listening) -> str:
    """What a first user pastes."""
    return f"""\
lbproxy is at {at.url}, with {SERVERS} simulated vLLM servers. Ctrl-C stops it. In another shell, try

    curl -sN {at.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
      "model": "{MODEL}", "stream": true, "max_tokens": 20,
      "messages": [{{"role": "user", "content": "Hello, who are you?"}}]}}'

or, with OpenAI's SDK (.venv/bin/python has it after `make test`; else pip install openai):

    from openai import OpenAI
    client = OpenAI(base_url="{at.url}/v1", api_key="none")
    response = client.chat.completions.with_raw_response.create(
        model="{MODEL}", max_tokens=20, messages=[{{"role": "user", "content": "Hello, who are you?"}}])
    print(response.headers["x-lbproxy-endpoint"], "responded:", response.parse().choices[0].message.content)

Dashboard: {at.admin_url}/dashboard
Metrics: curl -s {at.admin_url}/metrics"""
