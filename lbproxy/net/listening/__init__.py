"""Sockets that listen: opened, inherited, handed over to a successor, accepted from under a limit on descriptors.

`listener` accepts, `bind` opens, `inherit` passes sockets on, `certificate` is TLS for clients, `notify` reports to
systemd.

Imported by: `app`, `control`, `data_plane`, `proxy`. Never: what is sent on a connection.
"""
