# SPDX-License-Identifier: Apache-2.0
"""One request at the endpoints: attempts up to the commit point, then the relay of the response.

`exchange` is driven by callbacks, `steps` is its table of states, `relay` transfers the response, `exchanger` is what
all exchanges share; `continuation` has a stream go on where its endpoint died.

It writes to a client's transport, and pauses with it; reading from a client, and its connection's life, are `front`'s.

Imported by: `front`, `processes`, `sockets`. Never: which endpoint is next (the Balancer decides).
"""
