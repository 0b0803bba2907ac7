# SPDX-License-Identifier: Apache-2.0
"""What a simulated fleet was like: figures of one run and of policies compared over seeds, shares of flows, plots.

Imported by: `commands`, `demo`. Never: simulations, sockets, files.
"""
