"""`python -m lbproxy.demo.leash ARGUMENTS`: the command `lbproxy`, which ends when its standard input does.

Whoever starts it holds the other end of that pipe, so that nothing stays behind, whatever becomes of the starter.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading


def _follow() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_follow, daemon=True).start()
    runpy.run_module("lbproxy", run_name="__main__")
