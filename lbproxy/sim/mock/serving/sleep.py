# SPDX-License-Identifier: Apache-2.0
"""vLLM's sleep mode, as its development server has it: /sleep, /wake_up, /is_sleeping, and /collective_rpc for level 2.

As vLLM 0.32 (decision 0045): requests that arrive while it sleeps are accepted, and computed once it is awake again;
`mode=abort` ends what runs, `mode=wait` finishes it first; a second /wake_up does nothing; while it falls asleep or
wakes, /is_sleeping does not respond; /health, /v1/models and /metrics never change.

The GPU that servers on one machine share is an abstract Unix socket: who has bound it has the memory. A wake without it
fails as vLLM's does, out of memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import orjson
from aiohttp import web

from lbproxy.sim.mock.apis.fields import EngineError
from lbproxy.sim.mock.mock_options import MockOptions
from lbproxy.sim.mock.serving.desk import fields_of, json_response
from lbproxy.sim.mock.serving.driver import Driver

ALL_TAGS = frozenset({"weights", "kv_cache"})
MODES = ("abort", "wait", "keep")


class SleepMode:
    """That of one server."""

    def __init__(self, options: MockOptions, driver: Driver, clear_cache: Callable[[], None]) -> None:
        self._options, self._driver, self._clear_cache = options, driver, clear_cache
        self._tags: frozenset[str] = frozenset()
        """What of its memory it has given back."""
        self._changing = asyncio.Lock()
        self._gpu: socket.socket | None = None
        self.wakes = self.sleeps = 0
        """How often it did."""
        self.refused_wakes = 0
        """Wakes for which the GPU had no memory."""
        self.level = 0
        """The level of its sleep; 0 = it is awake."""

    @property
    def asleep(self) -> bool:
        """It computes nothing."""
        return self._driver.paused or bool(self._tags)

    def start(self) -> None:
        """Be as it is to be from the start. Raises OSError if another server has the GPU."""
        if self._options.asleep:
            self._tags, self.level = ALL_TAGS, self._options.sleep_level
            self._driver.pause()
        elif not self._take_gpu():
            raise OSError(f"another server has the memory of GPU {self._options.gpu!r}")

    def close(self) -> None:
        """Give the GPU back. May be called twice."""
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None

    def routes(self) -> list[web.RouteDef]:
        """None unless it has a sleep mode."""
        if not self._options.sleep_mode:
            return []
        return [
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake),
            web.get("/is_sleeping", self._is_sleeping, allow_head=False),
            web.post("/collective_rpc", self._rpc),
        ]

    def metrics(self) -> bytes:
        """What its metrics page has beside the rest."""
        if not self._options.sleep_mode:
            return b""
        name, shown = "vllm:engine_sleep_state", {"awake": 0, "weights_offloaded": 1, "discard_all": 2}
        lines = [f"# HELP {name} Engine sleep state.\n# TYPE {name} gauge\n"]
        for word, level in shown.items():
            labels = f'engine="0",model_name="{self._options.model}",sleep_state="{word}"'
            lines.append(f"{name}{{{labels}}} {float(level == self.level)}\n")
        return "".join(lines).encode()

    def _take_gpu(self) -> bool:
        """Whether it has the memory of its GPU now."""
        if self._options.gpu is None or self._gpu is not None:
            return True
        gpu = socket.socket(socket.AF_UNIX)
        try:
            gpu.bind(f"\0lbproxy-mock-gpu-{self._options.gpu}")
        except OSError:
            gpu.close()
            return False
        self._gpu = gpu
        return True

    async def _sleep(self, request: web.Request) -> web.StreamResponse:
        level, mode = request.query.get("level", "1"), request.query.get("mode", "abort")
        if level not in {"0", "1", "2"} or mode not in MODES:
            raise EngineError(400, "1 validation error:\n  Input should be 0 to 2, or a mode", "Bad Request")
        self._driver.pause()
        if mode == "abort":
            self._driver.abort_all("The engine was put to sleep.")
        elif mode == "wait":
            await self._driver.idle()
        async with self._changing:
            if level != "0" and not self._tags:
                await asyncio.sleep(self._options.sleep_time / self._options.speed)
                self._tags, self.level = ALL_TAGS, int(level)
                self.sleeps += 1
                self._clear_cache()
                self.close()
        return json_response(orjson.dumps({"status": "sleeping", "level": int(level)}))

    async def _wake(self, request: web.Request) -> web.StreamResponse:
        tags = frozenset(request.query.getall("tags", [])) or self._tags
        async with self._changing:
            if self._tags and tags & self._tags:
                if not self._take_gpu():
                    self.refused_wakes += 1
                    raise EngineError(500, "CUDA error: out of memory", "InternalServerError")
                if self.level == 1 or not self._tags - tags:
                    await asyncio.sleep(self._options.wake_time / self._options.speed)
                self._tags -= tags
            if not self._tags and self._driver.paused:
                self.level = 0
                self.wakes += 1
                self._driver.resume()
        status = "sleeping" if self._tags else "awake"
        return json_response(orjson.dumps({"status": status, "tags": request.query.getall("tags", []) or None}))

    async def _is_sleeping(self, _request: web.Request) -> web.StreamResponse:
        async with self._changing:
            return json_response(orjson.dumps({"is_sleeping": self.asleep}))

    async def _rpc(self, request: web.Request) -> web.StreamResponse:
        method = (await fields_of(request)).get("method")
        if not isinstance(method, str):
            raise EngineError(400, "Missing 'method' in request body", "Bad Request")
        return json_response(b'{"results":[null]}')
