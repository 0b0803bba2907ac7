# SPDX-License-Identifier: Apache-2.0
"""Routers before real vLLM servers, on CPU: `make bench-routing-real`.

The question: does what the simulated servers show (`benchmarks.http_routing`) hold before real engines, whose prefix
caches, schedulers, tokenizers and metrics are not ours? Recorded sessions are replayed through one router after the
other, each at its defaults; hits are of the engines' own counters.

- cells.py: who asks for what: recorded sessions, sized for a CPU.
- model.py: a model made here, whose prompts cost enough that a hit matters.
- servers.py: the vLLM servers, which stay up for a whole run; emptied caches, counters, CPU.
- client.py: the client's process, a closed loop (`http_routing.sessions` with these sessions).
- trial.py: one run, and whether it can be believed; which run follows which.
- results.py, pages.py: figures, tables.

Routers are those of `http_routing.routers`, started and pinned alike. There is no virtual time to compare with.
docs/benchmarks.md has the method and its limits.
"""
