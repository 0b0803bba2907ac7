# SPDX-License-Identifier: Apache-2.0
"""How simulated servers hand over the KV of a prompt: a class for each connector, and the side channel between servers.

`legs` is the interface: what a connector does with a request before and after it is served. `channel` carries the words
of one server to another, in place of NIXL's and Mooncake's own networks.

Imported by: `mock`, `mock/serving`. Never: what is computed, and how long it takes (`sim.engine` has that).
"""
