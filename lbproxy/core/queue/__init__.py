"""Requests that wait, in which order, and the moment at which one is placed.

`ticket` is a request's place in the balancer; `choice` decides where it goes now, or why nowhere; `waiting_queue` and
`held` keep those that wait and wake them; `flow` and `flows` share between clients; `overload` measures the pace.

In: the Balancer. Never: what an endpoint is like (it asks `policies` and `endpoints`).
"""
