# SPDX-License-Identifier: Apache-2.0
"""`make test-clients`: real client libraries through lbproxy, before simulated servers. Arguments go to pytest."""

from __future__ import annotations

import sys

import pytest

from tests.clients.environment import HERE, prepare
from tests.real.environment import Unavailable


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str]) -> int:
    try:
        prepare(say)
    except Unavailable as e:
        bar = "!" * 100
        say(f"{bar}\nSKIPPED: no client was tested.\n{e}\n{bar}")
        return 0
    return int(pytest.main([str(HERE), *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
