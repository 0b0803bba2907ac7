"""WebSockets, from the handshake's 101 to the last close frame: messages both ways, between a client and an endpoint.

`frames` cuts bytes into frames and writes frames (the only module that knows the library), `side` is one of the two
peers, `relay` joins two of them, with its table of states, `server_end` is the endpoint's connection.

In: `front.socket_turn`. Never: what a message means, or which endpoint it goes to. A message is never put together: it
is passed on frame by frame.
"""
