# SPDX-License-Identifier: Apache-2.0
"""Routers before real vLLM servers: on CPU `make bench-routing-real`, on GPUs `make bench-gpu`.

The question: does what the simulated servers show (`benchmarks.http_routing`) hold before real engines, whose prefix
caches, schedulers, tokenizers and metrics are not ours? Recorded sessions are replayed through one router after the
other, each at its defaults; hits are of the engines' own counters.

- cells.py: who asks for what: recorded sessions, told for a CPU, sized for others.
- fleet.py: servers, whoever started them, and what they say of themselves.
- load.py: what servers can do, and so how much a cell asks of them.
- model.py: a model made here, whose prompts cost enough that a hit matters.
- servers.py: vLLM servers that are started here and stay up for a whole run; emptied caches, CPU.
- client.py: the client's process, a closed loop (`http_routing.sessions` with these sessions).
- trial.py: one run, and whether it can be believed; which run follows which.
- results.py, pages.py: figures, tables.

Routers are those of `http_routing.routers`, started and pinned alike. There is no virtual time to compare with.
docs/benchmarks.md has the method and its limits.
"""
