"""One request at the endpoints: attempts up to the commit point, then the relay of the response.

`exchange` is driven by callbacks, `steps` is its table of states, `relay` transfers the response, `exchanger` is what
all exchanges share, `adapter_calls` sends one call to every endpoint.

Imported by: `front.turn`. Never: which endpoint is next (the Balancer decides), or a client's connection.
"""
