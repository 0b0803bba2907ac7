"""How a connection to an endpoint comes about: addresses, TCP or a Unix socket, TLS, a forward proxy.

`dial` tries what `names` knows in turn and in time; `origin` says where to, `tls` whom to believe, `tunnel` speaks
CONNECT, `vanished` sets the TCP options that find peers which are gone.

In: `connections.pool`. Never: HTTP, but for CONNECT.
"""
