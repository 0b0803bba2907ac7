# SPDX-License-Identifier: Apache-2.0
"""What a simulated fleet was like: figures of one run and of policies compared over seeds, shares of flows, plots.

Imported by: `demo`, `sim_cli`. Never: simulations, sockets, files.
"""
