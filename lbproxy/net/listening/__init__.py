"""Sockets that listen: opened, inherited, handed over to a successor, accepted from under a limit on descriptors.

`listener` accepts, `bind` opens, `inherit` passes sockets on, `certificate` is TLS towards clients, `notify` tells
systemd.

In: `proxy.front`, `control.admin`, `app`. Never: what is said on a connection.
"""
