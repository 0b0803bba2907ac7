# SPDX-License-Identifier: Apache-2.0
"""WebSockets, from the handshake's 101 to the last close frame: messages both ways, between a client and an endpoint.

`frames` parses and serialises frames (the only module that imports the library), `socket_relay` joins two of them, with
its table of states, `server_end` is the endpoint's connection.

Imported by: `front`. Never: the meaning of a message, or which endpoint it goes to. Messages are not assembled: they
are passed on frame by frame.
"""
