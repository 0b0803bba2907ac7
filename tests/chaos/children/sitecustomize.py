# SPDX-License-Identifier: Apache-2.0
"""Has the event loop of lbproxy's child processes watched: Python imports this first if the folder is in PYTHONPATH."""

from __future__ import annotations

import os
import sys

if "lbproxy.processes.child" in sys.orig_argv:
    from tests.chaos.ticker import watch

    watch(f"{os.environ['LBPROXY_CHAOS_WATCH']}.{os.getpid()}")
