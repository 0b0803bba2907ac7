# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel: the hot path compiled to C by mypyc where there is a C compiler, as it is where there is none.

The source is ordinary Python, and runs as such: in an editable install nothing is compiled, so that what is edited is
what runs. `LBPROXY_PURE=1 pip install .` makes a wheel without compiled modules; with `LBPROXY_COMPILED=1` a build that
cannot compile fails, as releases want it (release/wheels.py). Decision 27 has what it buys, and what the modules named
here must not do.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

COMPILED = {
    "lbproxy/core": "balancer placing",
    "lbproxy/core/requests": "media openai outcome outline prompt_keys prompts request retry",
    "lbproxy/core/responses": "joined json_walk lines objects sse unasked usage",
    "lbproxy/core/engines": "handover load_metrics",
    "lbproxy/core/caches": "adapters cache_loss cache_size prefix_index savings sessions",
    "lbproxy/core/capacity": "allowance bucket lanes opaque others regression reservations room slots space trends",
    "lbproxy/core/knowledge": (
        "gaps kv_model learning load_model placement pool_model pools prefill_work speed transfer work"
    ),
    "lbproxy/core/endpoints": (
        "backpressure breaker endpoint endpoint_set hang health judge progress serving slow_start state"
    ),
    "lbproxy/core/policies": "adaptive baselines explain policy registry scorers split",
    "lbproxy/core/queue": (
        "candidates choice dispatcher failed_attempts flow flows limits overdue queue_overload stored_responses "
        "ticket waiting_queue"
    ),
    "lbproxy/core/sleeping": "phase server servers sleepers",
    "lbproxy/core/scaling": "demand",
    "lbproxy/core/replicas": "journal peers",
    "lbproxy/core/observed": "ledger record snapshot",
    "lbproxy/driver": "request_runtime runtime",
    "lbproxy/workers": "contents known link origins remote reports server",
    "lbproxy/net/connections": "backlog corked h1 patience pool upload",
    "lbproxy/proxy/request": "client_request forwarding handshake headers plain reading",
    "lbproxy/proxy/exchange": "continuation exchange exchanger failures opening relay steps used",
    "lbproxy/proxy/front": "requests socket_turn turn",
    "lbproxy/control/families": "histogram requests",
    "lbproxy/control/telemetry": "access_line process_log recent telemetry writer",
}
"""By folder, what each request goes through."""
MUST_COMPILE = bool(os.environ.get("LBPROXY_COMPILED"))
"""Whether a wheel that is not compiled is an error."""


def say(line: str) -> None:
    """Tell who waits at the terminal; pip shows nothing of what a build prints."""
    with suppress(OSError), open("/dev/tty", "w") as terminal:
        terminal.write(f"\r\n  lbproxy: {line}\r\n")


class BuildOrNot(build_ext):
    """If the compiler fails, the wheel has the Python modules alone."""

    def run(self) -> None:
        """See setuptools."""
        try:
            super().run()
        except Exception as error:  # whatever is wrong with a compiler
            if MUST_COMPILE:
                raise
            self.warn(f"lbproxy is not compiled, and takes twice the CPU for a request: {error}")
            for made in Path(self.build_lib).rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
                made.unlink()
            self.extensions = []

    def finalize_options(self) -> None:
        """See setuptools, which by itself uses one processor."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()  # for extensions beside each other

    def build_extensions(self) -> None:
        """See setuptools. Nearly all code is in one extension, whose files are compiled beside each other, too."""
        compile_files = self.compiler.compile
        began, total, done = time.monotonic(), sum(len(one.sources) for one in self.extensions), 0

        def compile_each(sources: list[str], **how: object) -> list[str]:
            nonlocal done
            paths: list[str] = []
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                for objects in pool.map(lambda source: compile_files([source], **how), sources):
                    paths += objects
                    done += 1
                    if done * 4 // total > (done - 1) * 4 // total:
                        say(f"{done} of {total} files compiled after {time.monotonic() - began:.0f} s")
            return paths

        self.compiler.compile = compile_each
        super().build_extensions()


def extensions() -> list[Extension]:
    """What is to be compiled now."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if not {"bdist_wheel", "build_ext"} & {*sys.argv} or os.environ.get("LBPROXY_PURE"):
        return []
    if not shutil.which(compiler):
        if MUST_COMPILE:
            sys.exit(f"lbproxy is to be compiled, and there is no {compiler}")
        return []
    from mypyc.build import mypycify  # noqa: PLC0415 - not there, and not needed, where nothing is compiled

    files = [f"{folder}/{name}.py" for folder, names in COMPILED.items() for name in names.split()]
    say(
        f"translates {len(files)} modules to C and compiles them: three to ten minutes, longer on a busy machine. With "
        "LBPROXY_PURE=1 it takes less than one, and a request twice the CPU"
    )
    try:
        made: list[Extension] = mypycify(files, opt_level="2", debug_level="0", multi_file=True, group_name="lbproxy")
    except SystemExit:  # it said why: types that it does not know, or knows differently
        if MUST_COMPILE:
            raise
        print("lbproxy is not compiled, and takes twice the CPU for a request", file=sys.stderr)  # noqa: T201
        return []
    return made


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildOrNot})
