"""Connections to endpoints while they stand: HTTP/1.1 (`h1`, sans-io), kept and shared (`pool`), written together
(`corked`).

`patience` has the deadlines of an attempt: which clock runs, and what its end means. `fetch` is one small response,
complete and bounded, for probes and scrapes.

In: `proxy.exchange`, `control.probing`. Never: retries, or a client.
"""
