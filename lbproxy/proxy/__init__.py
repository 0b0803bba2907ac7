"""The data plane: clients in front, endpoints behind, one exchange for each request.

    request -> exchange -> front

It never looks after endpoints: it asks the Balancer by way of `runtime`, and tells it what happened.
"""
