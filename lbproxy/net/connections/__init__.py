# SPDX-License-Identifier: Apache-2.0
"""Established connections to endpoints: HTTP/1.1 (`h1`, sans-io), the pool that keeps and shares them (`pool`), and
writes that are sent together (`corked`).

`patience` has the deadlines of an attempt: which clock runs, and what happens when it expires. `fetch` gets one small,
bounded response, for probes and scrapes.

Imported by: `commands`, `control`, `processes`, `proxy`. Never: retries, or a client.
"""
