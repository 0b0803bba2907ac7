# SPDX-License-Identifier: Apache-2.0
"""The balancer on an event loop: the clock, the timer, and the callbacks of requests that wait.

`request_runtime` is what the data plane knows of the balancer; `runtime` drives one in this process, and
`workers.remote` speaks to one in another. `pulse` says whether the loop stood still, which everybody needs who waits
for others. `model_look` asks all endpoints for a model that none listed, and finds who asks them. `own_load` is what a
process says of its own limits.

Imported by: `control`, `extras`, `net`, `processes`, `proxy`, `workers`. Never: a decision (`core` makes them), a
socket.
"""
