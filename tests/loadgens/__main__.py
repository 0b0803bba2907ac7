# SPDX-License-Identifier: Apache-2.0
"""`make test-loadgens`: load generators through lbproxy, before simulated servers. Arguments go to pytest."""

from __future__ import annotations

import sys

import pytest

from tests.loadgens import report
from tests.loadgens.environment import HERE, prepare
from tests.loadgens.report import Report


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str]) -> int:
    missing = prepare(say)
    for name, why in missing.items():
        bar = "!" * 100
        say(f"{bar}\nSKIPPED: {name} cannot be installed here.\n{why}\n{bar}")
    code = pytest.main([str(HERE), *arguments])
    report.keep([Report(f"{name} ", " ".join(why.split()), {}, {}) for name, why in missing.items()])
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
