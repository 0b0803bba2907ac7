"""The composition root: settings in, a running proxy out. Everything is made here, and nothing is decided.

`serve` runs until it is told to stop. Order of the start: listeners first, so that a bad address fails at once and a
proxy with dead endpoints is there and says so; order of the stop: no new requests, the running ones up to the deadline,
then the control plane, then every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from lbproxy import __version__
from lbproxy.config import Address, Settings
from lbproxy.control.admin import Admin
from lbproxy.control.discovery import Discovery
from lbproxy.control.prober import Prober
from lbproxy.control.scraper import Scraper, Scraping
from lbproxy.control.telemetry import Telemetry
from lbproxy.control.watch import Loops, Watches
from lbproxy.core.balancer import Balancer
from lbproxy.core.engines import Engines
from lbproxy.core.policy import make_policy
from lbproxy.core.types import Endpoint
from lbproxy.net.pool import ConnectionPool
from lbproxy.proxy.exchange import Exchanger
from lbproxy.proxy.server import FrontEnd
from lbproxy.runtime import Runtime, logger, supervise


class Listening(NamedTuple):
    """Where a running proxy is reached."""

    url: str
    admin_url: str | None


async def serve(settings: Settings, *, stop: asyncio.Event, on_ready: Callable[[Listening], None]) -> None:
    """Run until `stop` is set. `on_ready` is called once, when both listeners accept.

    Raises OSError if an address cannot be listened on.
    """
    _raise_descriptor_limit()
    rng = random.Random()  # noqa: S311 - spreads load and retries; nothing secret hangs on it
    connections = ConnectionPool()
    telemetry = Telemetry(settings.log)
    balancer = Balancer(
        make_policy(settings.routing, rng),
        admission=settings.admission,
        health=settings.health,
        scrape=settings.scrape,
        retry=settings.retry,
        rng=rng,
        breaker=settings.breaker,
    )
    runtime = Runtime(balancer, [telemetry])
    front = FrontEnd(settings, runtime, Exchanger(settings, runtime, connections), rng)
    runtime.move_stranded = front.move_stranded
    telemetry.watch(runtime, front, connections)
    scraping = Scraping(connections, settings.scrape, Engines(settings.engines), rng)
    discovery = Discovery(settings, rng)
    telemetry.watch_names(discovery.names)
    admin = None if settings.admin is None else Admin(runtime, front, telemetry)
    try:
        first = runtime.set_endpoints(discovery.endpoints())
        listening = await _listen(settings, front, admin)
        async with asyncio.TaskGroup() as tasks:

            def loops_of(endpoint: Endpoint) -> Loops:
                return _loops(endpoint, settings, runtime, scraping, telemetry)

            watches = Watches(tasks, loops_of, rng)
            watches.follow(first)
            sources = [
                tasks.create_task(supervise(name, run, rng))
                for name, run in discovery.loops(runtime, lambda specs: watches.follow(runtime.set_endpoints(specs)))
            ]
            sources.append(tasks.create_task(supervise("the watch over endpoints", runtime.keep_checking, rng)))
            logger.info(_banner(settings, listening), extra={"event": "start"})
            _settle_garbage_collector()
            on_ready(listening)
            await stop.wait()
            text = "stopping: %d requests run and have up to %g s"
            logger.info(text, front.running, settings.drain.deadline, extra={"event": "stop"})
            cut = await front.stop(settings.drain.deadline)
            logger.info("stopped: %d requests were cut", cut, extra={"event": "stop"})
            for source in sources:
                source.cancel()
            watches.close()
    finally:
        discovery.close()
        if admin is not None:
            await admin.close()
        connections.close()
        telemetry.close()


async def _listen(settings: Settings, front: FrontEnd, admin: Admin | None) -> Listening:
    """Open both listeners."""
    port = await _open(front.listen, settings.listen, "listen")
    url = _url(settings.listen, port)
    if admin is None or settings.admin is None:
        return Listening(url, None)
    return Listening(url, _url(settings.admin, await _open(admin.start, settings.admin, "admin")))


async def _open(listen: Callable[[str, int], Awaitable[int]], address: Address, key: str) -> int:
    """The port that was opened. Raises OSError with a text that says which setting to change."""
    try:
        return await listen(address.host, address.port)
    except OSError as error:
        why = os.strerror(error.errno).lower() if error.errno else str(error)
        raise OSError(f"cannot listen on {address.host}:{address.port} ({key}): {why}") from error


def _loops(
    endpoint: Endpoint,
    settings: Settings,
    runtime: Runtime,
    scraping: Scraping,
    telemetry: Telemetry,
) -> Loops:
    """The loops that look after one endpoint."""
    prober = Prober(endpoint, runtime, scraping.connections, settings.health, scraping.rng)
    scraper = Scraper(endpoint, runtime, scraping)
    telemetry.watch_scrapes(scraper)
    return [(f"prober of {endpoint.name}", prober.run), (f"scraper of {endpoint.name}", scraper.run)]


def _url(address: Address, port: int) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"http://{host}:{port}"


def _banner(settings: Settings, listening: Listening) -> str:
    names = [endpoint.name for endpoint in settings.endpoints]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    resolved = sum(endpoint.is_name for endpoint in settings.endpoints)
    dns = f" and the addresses of {resolved} DNS names" if resolved else ""
    return (
        f"lbproxy {__version__} listens on {listening.url}, admin on {listening.admin_url or 'nothing'}; "
        f"balances {len(names) - resolved} endpoints{dns} ({shown}) by {settings.routing.policy}; "
        "no API keys: open to everybody who reaches it"
    )


def _settle_garbage_collector() -> None:
    """What is there now stays: walking it again and again, mostly modules, is 5 % of the CPU time of a small request.

    A request leaves no cycles behind, so few collections are needed, and the oldest generation holds what lives long:
    waiting requests, connections, endpoints.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _raise_descriptor_limit() -> None:
    """A proxy needs two descriptors for each request; the usual soft limit of 1,024 is for programs that use few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems call the hard limit infinite and mean it not
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
