# SPDX-License-Identifier: Apache-2.0
"""A fleet in virtual time: simulated servers, one or more real Balancers before them, and a workload.

Imported by: `commands`, `figures`. Never: sockets, or the clock of this machine.
"""
