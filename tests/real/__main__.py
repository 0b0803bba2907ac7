# SPDX-License-Identifier: Apache-2.0
"""`make test-real`: everything in this folder, its environment made first.

Where the real servers cannot be had it says so, in a way that nobody overlooks, and ends with 0: that is no failure of
lbproxy. Further arguments go to pytest.
"""

from __future__ import annotations

import sys
import time

import pytest

from tests.clients import environment as clients
from tests.real.environment import HERE, Unavailable, prepare


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str]) -> int:
    start = time.monotonic()
    try:
        prepare(say)
        clients.prepare(say)
    except Unavailable as e:
        bar = "!" * 100
        say(f"{bar}\nSKIPPED: nothing was tested on real servers.\n{e}\n{bar}")
        return 0
    prepared = time.monotonic() - start
    code = pytest.main([str(HERE), *arguments])
    say(f"{prepared:.0f} s to prepare, {time.monotonic() - start:.0f} s in all")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
