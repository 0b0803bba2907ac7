# SPDX-License-Identifier: Apache-2.0
"""Proxy CPU per request and per streamed event, delays and memory: lbproxy beside other proxies, in one run.

`make bench-overhead`. The proxy under measurement has core 0 to itself; load (load.c), the model server (server.c) and
this program share core 1. Every proxy gets the same requests to the same server; they take turns, and whoever is not
being measured is stopped by SIGSTOP. docs/benchmarks.md has the method and its limits.

- subjects.py: which proxies there are, how each is configured and started. A further one is one more entry.
- process.py: a proxy that runs: pinned, ready, paused, its CPU and memory.
- load.py: the workloads, and one run of load.c against a port.
- plan.py: which workload and subject follows which; collects the raw figures.
- report.py: raw figures -> Markdown.
- hotspots.py: where lbproxy's time goes (py-spy).

Nothing here imports lbproxy: it is measured as its users start it.
"""
