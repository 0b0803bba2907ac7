# SPDX-License-Identifier: Apache-2.0
"""lbproxy by its own command line, with a ticker on the event loop of each of its processes.

    LBPROXY_CHAOS_WATCH=FILE python -m tests.chaos.watched --config cfg.yaml

What tickers see is written to FILE, those of child processes (`workers`) to FILE.PID: see `ticker.py`. Children are
watched by `children/sitecustomize.py`, if its folder is in PYTHONPATH.
"""

from __future__ import annotations

import os
import sys

from lbproxy.commands import cli
from tests.chaos.ticker import watch

if __name__ == "__main__":
    watch(os.environ["LBPROXY_CHAOS_WATCH"])
    sys.exit(cli.main())
