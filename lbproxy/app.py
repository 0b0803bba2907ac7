"""The composition root: settings in, a running proxy out. Everything is made here, and nothing is decided.

`serve` runs until it is told to stop. Order of the start: listeners first, so that a bad address fails at once and a
proxy with dead endpoints is there and says so; order of the stop: no new requests, the running ones up to the deadline,
then the control plane, then every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from lbproxy import __version__
from lbproxy.config import Address, Settings
from lbproxy.control.admin import Admin
from lbproxy.control.discovery import static_endpoints
from lbproxy.control.prober import Prober
from lbproxy.control.scraper import Scraper
from lbproxy.control.telemetry import Telemetry
from lbproxy.core.balancer import Balancer
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
        make_policy(settings.routing),
        admission=settings.admission,
        health=settings.health,
        scrape=settings.scrape,
        rng=rng,
    )
    runtime = Runtime(balancer, [telemetry])
    front = FrontEnd(settings, runtime, Exchanger(settings, runtime, connections), rng)
    telemetry.watch(runtime, front, connections)
    admin = None if settings.admin is None else Admin(runtime, front, telemetry)
    try:
        endpoints = runtime.set_endpoints(static_endpoints(settings)).added
        listening = await _listen(settings, front, admin)
        async with asyncio.TaskGroup() as tasks:
            watchers = [
                tasks.create_task(supervise(name, run, rng))
                for endpoint in endpoints
                for name, run in _watches(endpoint, settings, runtime, connections, telemetry, rng)
            ]
            logger.info(_banner(settings, listening))
            on_ready(listening)
            await stop.wait()
            logger.info("stopping: running requests have %g s", settings.drain.deadline)
            await front.stop(settings.drain.deadline)
            for watcher in watchers:
                watcher.cancel()
    finally:
        if admin is not None:
            await admin.close()
        connections.close()
        telemetry.close()


async def _listen(settings: Settings, front: FrontEnd, admin: Admin | None) -> Listening:
    """Open both listeners."""
    port = await front.listen(settings.listen.host, settings.listen.port)
    url = _url(settings.listen, port)
    if admin is None or settings.admin is None:
        return Listening(url, None)
    admin_port = await admin.start(settings.admin.host, settings.admin.port)
    return Listening(url, _url(settings.admin, admin_port))


def _watches(
    endpoint: Endpoint,
    settings: Settings,
    runtime: Runtime,
    connections: ConnectionPool,
    telemetry: Telemetry,
    rng: random.Random,
) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """The loops that look after one endpoint, by name."""
    prober = Prober(endpoint, runtime, connections, settings.health, rng)
    scraper = Scraper(endpoint, runtime, connections, settings.scrape, rng)
    telemetry.watch_scrapes(scraper)
    return [(f"prober of {endpoint.name}", prober.run), (f"scraper of {endpoint.name}", scraper.run)]


def _url(address: Address, port: int) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"http://{host}:{port}"


def _banner(settings: Settings, listening: Listening) -> str:
    names = [endpoint.name for endpoint in settings.endpoints]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"lbproxy {__version__} listens on {listening.url}, admin on {listening.admin_url or 'nothing'}; "
        f"balances {len(names)} endpoints ({shown}) by {settings.routing.policy}; open to all, no keys"
    )


def _raise_descriptor_limit() -> None:
    """A proxy needs two descriptors for each request; the usual soft limit of 1,024 is for programs that use few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # some systems call the hard limit infinite and mean it not
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
