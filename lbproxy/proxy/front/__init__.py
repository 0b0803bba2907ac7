# SPDX-License-Identifier: Apache-2.0
"""Clients' connections, from accepting a request to the last byte of its response.

`server` has limits, refusals and shutdown; `connection` is aiohttp's with a fast lane; `turn` is one request on it,
`socket_turn` one that asks for a WebSocket; `bodies` reads request bodies; `arrivals` and `linger` limit how long a
client may keep something open, beside net/listening/deadlines.py; `overload` protects the process itself;
`adapter_calls` and `ollama_lists` ask every endpoint.

Imported by: `processes`. Never: endpoints.
"""
