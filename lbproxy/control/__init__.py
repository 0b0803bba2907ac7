"""The control plane: what looks after the endpoints, and what tells people and machines how lbproxy is doing.

    probing -> discovery -> telemetry -> admin

It never sees a client's request: it meets the data plane in `runtime` and `app` alone.
"""
