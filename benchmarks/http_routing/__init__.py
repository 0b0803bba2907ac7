# SPDX-License-Identifier: Apache-2.0
"""Routers that people can install, before simulated vLLM servers, over real HTTP: `make bench-routing-http`.

The question: do the advantages that virtual time shows (`benchmarks.routing`) hold through sockets, event loops and
scrapes, against the rivals' own code? Each run starts everything afresh: the servers (one process, core 1), one router
(core 0) and an open-loop client (core 1), which replays the same arrivals with the same bytes for every router. The
same arrivals are then simulated, so that the tables say how far virtual time and HTTP agree.

- cells.py: what is asked: workloads, arrivals of a seed, request bodies.
- routers.py: who is asked: each router with its defaults and one documented tuning. A further one is one more entry.
- servers.py, client.py: the two processes around a router.
- trial.py: one run, and whether it can be believed; which run follows which.
- results.py: raw figures -> `lbproxy.sim.figures.report`'s, and those of virtual time.
- pages.py: tables and pictures.

A run in which servers or client were late (99th percentile above 5 ms) is rejected and done again. docs/benchmarks.md
has the method and its limits.
"""
