# SPDX-License-Identifier: Apache-2.0
"""lbproxy under attack: started with the settings of a form, on its core; its memory, descriptors and log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import yaml

from tests.support.docs import ROOT
from tests.support.process import LBPROXY, children_of

MIB = 1 << 20
KEY = "sk-friend-0123456789abcdef0123456789abcdef"
HOSTILE_KEY = "sk-hostile-0123456789abcdef0123456789abcde"
MANIFEST = ROOT / "deploy" / "kubernetes" / "lbproxy.yaml"
FORMS = ("default", "kubernetes")
SIGNS: Final = re.compile(rb"Traceback|never retrieved|was never awaited|\"level\":\"critical\"")
"""What says that something was lost."""

USUAL: Final = re.compile(rb"is not compiled|which vllm should export")
LOOKS = 10
"""At descriptors: a probe may have one for a moment, and the page is a moment later than the count."""


def _manifest() -> tuple[dict[str, object], str]:
    """The settings of the Kubernetes manifest, and the memory that it allows."""
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    settings = next(yaml.safe_load(one["data"]["lbproxy.yaml"]) for one in documents if one["kind"] == "ConfigMap")
    deployment = next(one for one in documents if one["kind"] == "Deployment")
    memory = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    return settings, memory.replace("Gi", "GiB").replace("Mi", "MiB")


def settings(form: str, folder: Path, endpoints: Sequence[dict[str, object]]) -> str:
    """A file's text. Limits are those of the form; the manifest's memory is set where a container would have it."""
    own: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "auth": {"keys": [KEY, HOSTILE_KEY]},
        "log": {"access": False},
        "drain": {"lame_duck": "0s"},
        "endpoints": list(endpoints),
    }
    if form == "kubernetes":
        theirs, memory = _manifest()
        own = {**theirs, **own, "limits": {"memory": memory}, "state": {"file": str(folder / "state")}}
    return yaml.safe_dump(own)


class Target:
    """A running lbproxy."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self.signs = 0
        """Of `SIGNS`, in what was read of the log."""
        self.errors: list[str] = []
        """Lines with one, and those of level error; the first hundred."""
        self.warnings: Counter[str] = Counter()
        """How often it warned of what, but for what every start says."""
        listening = self._wait_for(r"listens on http://[\w.]+:(\d+), admin on http://[\w.]+:(\d+)")
        self.port, self.admin_port = int(listening[1]), int(listening[2])

    def _wait_for(self, pattern: str, within_s: float = 60.0) -> re.Match[str]:
        end = time.monotonic() + within_s
        while (match := re.search(pattern, self.log.read_text("utf-8", "replace"))) is None:
            assert self.process.poll() is None, self.log.read_text("utf-8", "replace")
            assert time.monotonic() < end, f"no {pattern!r} in {self.log}"
            time.sleep(0.05)
        return match

    @property
    def pids(self) -> list[int]:
        return [self.process.pid, *children_of(self.process.pid)]

    def alive(self) -> bool:
        return self.process.poll() is None

    def _status(self, name: str) -> int:
        """A size in bytes, summed over its processes."""
        found = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                page = Path(f"/proc/{pid}/status").read_text()
                found += int(re.findall(rf"{name}:\s+(\d+)", page)[0]) << 10
        return found

    def rss(self) -> int:
        return self._status("VmRSS")

    def rss_at_rest(self, seconds: float) -> int:
        """The least of so long: what servers send is read for a moment, also when nobody asks."""
        found = self.rss()
        for _ in range(int(2 * seconds)):
            time.sleep(0.5)
            found = min(found, self.rss())
        return found

    def peak(self) -> int:
        """The highest RSS since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def cpu_s(self) -> float:
        ticks = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        """Those that are neither a client's connection nor one to an endpoint, as lbproxy counts these."""
        return min(self._descriptors() for _ in range(LOOKS))

    def _descriptors(self) -> int:
        time.sleep(0.1)
        own = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.pids)
        page = self.metrics()
        known = re.findall(r"^lbproxy_(?:client|upstream)_connections(?:\{[^}]*\})? (\d+)", page, re.MULTILINE)
        return own - sum(map(int, known))

    def connections(self) -> int:
        """Of clients, as lbproxy counts them."""
        found = re.findall(r"^lbproxy_client_connections(?:\{[^}]*\})? (\d+)", self.metrics(), re.MULTILINE)
        return sum(map(int, found))

    def metrics(self) -> str:
        return httpx.get(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=20, trust_env=False).text

    def settled(self, within_s: float) -> bool:
        """Nothing of any client is left. Blocks: nobody else may need the loop."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if self.connections() == 0:
                    return True
            time.sleep(0.2)
        return False

    def read_log(self) -> None:
        """Look at what was logged since the last time, and empty the file."""
        text = self.log.read_bytes()
        with self.log.open("r+b") as file:
            file.truncate(0)
        for line in text.splitlines():
            signs = len(SIGNS.findall(line))
            self.signs += signs
            if (signs or b'"level":"error"' in line) and len(self.errors) < 100:
                self.errors.append(line.decode("utf-8", "replace")[:4000])
            if b'"level":"warning"' in line and (message := re.search(rb'"message":"([^"]+)', line)):
                if USUAL.search(message[1]):
                    continue
                self.warnings[re.sub(r"\d+", "N", message[1].decode("utf-8", "replace"))[:100]] += 1


def buffered_bodies(form: str) -> int:
    """The default of `limits.buffered_bodies`, in bytes."""
    memory = 1 << 30 if form == "kubernetes" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(512 * MIB, memory // 4)


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """What is started within the block runs there. None: anywhere."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def running(form: str, folder: Path, endpoints: Sequence[dict[str, object]], core: int | None) -> Iterator[Target]:
    """lbproxy with the limits of `form`, on its core."""
    config, log = folder / "cfg.yaml", folder / "lbproxy.log"
    config.write_text(settings(form, folder, endpoints))
    with log.open("ab") as output, on_core(core):
        process = subprocess.Popen([*LBPROXY, "--config", str(config)], stdout=output, stderr=output, cwd=ROOT)
    try:
        yield Target(process, log)
    finally:
        children = children_of(process.pid)
        if process.poll() is None:
            process.kill()
        process.wait()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
