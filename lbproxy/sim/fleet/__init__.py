"""A fleet in virtual time: simulated servers, one or more real Balancers before them, a workload, and the figures.

Imported by: `demo`, `sim_cli`. Never: sockets, or the clock of this machine.
"""
