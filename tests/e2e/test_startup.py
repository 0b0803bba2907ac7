# SPDX-License-Identifier: Apache-2.0
"""What a plain start loads: only what it needs. Times are the benchmark's (`python -m benchmarks.startup`)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.process import Process, Program
from tests.support.workers import one_process

UNWANTED = {
    "dns": "25 ms; only endpoints with names, looked up by the resolver's thread",
    "httpx": "110 ms; the client of the command line",
    "rich": "its tables",
    "matplotlib": "plots of `lbproxy sim`",
    "lbproxy.sim": "simulated servers",
    "lbproxy.commands.check": "another command",
    "lbproxy.demo": "another command",
    "lbproxy.commands.sim": "another command",
    "lbproxy.commands.operate": "other commands",
    "multiprocessing": "`lbproxy sim` alone has several processes",
    "shtab": "an extra",
    "redis": "an extra",
    "jinja2": "an extra",
    "opentelemetry": "an extra",
}
CONFIG = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\ndrain: {lame_duck: 0s}\nendpoints: [http://127.0.0.1:9]\n"


def loaded(process: Process) -> set[str]:
    """Modules, by what `-X importtime` wrote."""
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", process.output, re.MULTILINE))


@one_process("of what one process imports")
def test_a_start_loads_only_what_it_needs(tmp_path: Path) -> None:
    """Each of these was, or could easily become, a good part of the time to the first answer."""
    config = tmp_path / "cfg.yaml"
    config.write_text(CONFIG)
    with Program([sys.executable, "-X", "importtime", "-m", "lbproxy", "--config", str(config)]) as process:
        process.wait_for("listens on")
        assert process.stop() == 0
        modules = loaded(process)
    assert {"lbproxy.processes.app", "lbproxy.proxy.front.server", "aiohttp.web"} <= modules, (
        "the list is not what it should be"
    )
    needless = {name: why for name, why in UNWANTED.items() if any(f"{one}.".startswith(f"{name}.") for one in modules)}
    assert needless == {}


def test_help_does_not_wait_for_the_proxy() -> None:
    with Program([sys.executable, "-X", "importtime", "-m", "lbproxy", "--help"]) as process:
        assert process.process.wait(30) == 0
        process.read()
        assert "aiohttp" not in loaded(process)
        assert "lbproxy.commands.cli" in loaded(process)
