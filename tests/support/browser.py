# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by its own DevTools protocol over a WebSocket: no driver and no library besides aiohttp.

Debian's package is `chromium` (`make test-tools`); LBPROXY_BROWSER names another. It reaches 127.0.0.1 only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import tempfile
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import aiohttp
import pytest

BROWSER = os.environ.get("LBPROXY_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: dashboard NOT tested; `make test-tools`")

ARGUMENTS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync"),
    *("--disable-extensions", "--mute-audio", "--no-default-browser-check", "--remote-debugging-port=0", "--lang=en"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
STARTS_S = 60.0
ANSWERS_S = 30.0

Fields = dict[str, Any]


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Fields]] = {}
        self._session: str | None = None
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []
        """Exceptions that nobody caught, and what the browser refused or warned of."""

    async def read(self) -> None:
        """Take what the browser says, until it ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            if (waiting := self._waiting.pop(said.get("id", 0), None)) is not None:
                if not waiting.done():
                    waiting.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif said.get("method") == "Page.loadEventFired":
                self._loaded.set()
            elif said.get("method") == "Log.entryAdded":
                self.complaints.append(said["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: object) -> Fields:
        """One command; its result."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        command = {"id": number, "method": method, "params": parameters}
        await self._socket.send_str(json.dumps(command | ({"sessionId": self._session} if self._session else {})))
        async with asyncio.timeout(ANSWERS_S):
            said = await self._waiting[number]
        assert "error" not in said, f"{method}: {said['error']}"
        return dict(said["result"])

    async def open(self) -> None:
        """Make the tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def visit(self, url: str) -> None:
        """Go there."""
        went = await self.call("Page.navigate", url=url)
        assert "errorText" not in went, went

    async def reload(self, expression: str = "location.reload()") -> None:
        """Do what makes the page load again, and wait until it has: before that, the old page would answer."""
        self._loaded.clear()
        await self.js(f"void setTimeout(() => {{ {expression} }})")  # told before the page that tells it is gone
        async with asyncio.timeout(ANSWERS_S):
            await self._loaded.wait()

    async def js(self, expression: str) -> Any:
        """What the expression is; a promise's value."""
        result = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str, *, within_s: float = 30.0) -> Any:
        """Wait until the expression is true; what it is then. While it cannot be evaluated it is not."""
        tried = f"(() => {{ try {{ return {expression} }} catch {{ return null }} }})()"
        value = None
        try:
            async with asyncio.timeout(within_s):
                while not value:
                    value = await self.js(tried)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            shown = await self.js("document.body?.innerText")
            raise AssertionError(f"not within {within_s} s: {expression}\n{shown}") from None
        return value

    async def press(self, key: str, code: int, text: str = "") -> None:
        """One key."""
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text
            )

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def look(
        self, width: int, height: int, scheme: Literal["light", "dark"] = "light", scale: float = 1.0
    ) -> None:
        """Through a window of this size, with this preference."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self) -> bytes:
        """What is in the window, as PNG."""
        return b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """A tab in a browser of its own."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(prefix="lbproxy-browser-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(BROWSER, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        drain: asyncio.Future[bytes] | None = None
        try:
            address, drain = await _address(process)
            async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
                tab = Page(socket)
                reading = asyncio.ensure_future(tab.read())
                await tab.open()
                yield tab
                with suppress(AssertionError, TimeoutError, ConnectionError):
                    await tab.call("Browser.close")
                reading.cancel()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # with all its children
            await process.wait()
            if drain is not None:  # to the end of the pipe, or the loop is closed with it
                await asyncio.wait([drain], timeout=ANSWERS_S)


async def _address(process: asyncio.subprocess.Process) -> tuple[str, asyncio.Future[bytes]]:
    """Where it listens; it says so on stderr, which must be read on."""
    assert process.stderr is not None
    async with asyncio.timeout(STARTS_S):
        while line := await process.stderr.readline():
            if match := re.search(rb"DevTools listening on (ws://\S+)", line):
                return match[1].decode(), asyncio.ensure_future(process.stderr.read())
    raise AssertionError("Chromium did not start")
