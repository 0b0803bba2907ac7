"""Clients' connections, from accepting a request to the last byte of its response.

`server` has limits, refusals and stopping; `connection` is aiohttp's with a fast lane; `turn` is one request on it,
`socket_turn` one that asks for a WebSocket; `bodies` reads, `deadlines` and `linger` bound what a client may keep
open, `overload` protects the process itself.

In: `app`. Never: endpoints.
"""
