# SPDX-License-Identifier: Apache-2.0
"""Sockets that listen: opened, inherited, handed over to a successor, accepted from under a limit on descriptors.

`listener` accepts, `deadlines` limit how long who connected may take, `bind` opens, `inherit` passes sockets on,
`notify` reports to systemd.

Imported by: `commands`, `control`, `demo`, `processes`, `proxy`. Never: what is sent on a connection.
"""
