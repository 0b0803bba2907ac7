# SPDX-License-Identifier: Apache-2.0
"""`python -m lbproxy.demo.leash ARGUMENTS`: the command `lbproxy`, which ends when its standard input does.
`python -m lbproxy.demo.leash -- PROGRAM ARGUMENTS`: the same for another program.

Whoever starts it holds the other end of that pipe, so that nothing stays behind, whatever becomes of the starter.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

MAX_FILES = 4096
"""More than are open when a process starts."""


def _follow() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass


def _follow_and_exit() -> None:
    _follow()
    os._exit(1)


def _become(command: list[str]) -> None:
    """Replace this process by the program, which so keeps its process id; a child of it reads the pipe and kills it."""
    program = os.getpid()
    if os.fork() == 0:
        # Its output must end with the program, not with this child; uvloop leaves copies of it open in what it starts.
        os.closerange(1, MAX_FILES)
        _follow()
        if os.getppid() == program:  # else it has ended already, and its id may be another's
            os.kill(program, signal.SIGKILL)
        os._exit(0)
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    if sys.argv[1:2] == ["--"]:
        _become(sys.argv[2:])
    threading.Thread(target=_follow_and_exit, daemon=True).start()
    runpy.run_module("lbproxy", run_name="__main__")
