# SPDX-License-Identifier: Apache-2.0
"""How a connection to an endpoint is made: addresses, TCP or a Unix socket, TLS, a forward proxy.

`dial` tries the addresses of `names` one after the other, within a time limit; `origin` is the destination; `tls`
verifies certificates; `vanished` sets the TCP options that detect vanished peers; `above` has paths of endpoints.

Imported by: `connections`, `control`, `proxy`. Never: HTTP, except for CONNECT.
"""
