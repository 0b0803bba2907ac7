# SPDX-License-Identifier: Apache-2.0
"""The words of the connectors by which the simulated server gets or gives the KV of a prompt: fields and metrics.

`nixl` and `sglang` read what a body says of a transfer, and word what a response says; `storage` is how a shared folder
names prompts; `families` has what the metrics page gains. All of it is docs/decisions/0041 in code. Pure.

Imported by: `mock`, `mock/connectors`. Never: a connection, a file, a clock.
"""
