"""A fleet in virtual time: simulated servers, one or more real Balancers before them, a workload, and the figures.

In: `lbproxy sim`, the benchmarks, the tests. Never: sockets, or the clock of this machine.
"""
