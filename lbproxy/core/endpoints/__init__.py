# SPDX-License-Identifier: Apache-2.0
"""Which endpoints there are, and which may be asked: the set, the health machine, the circuit breaker, the index by
model.

`endpoint_set` owns each `EndpointState`. `judge` moves it through the states of `health`, by the results of probes and
requests (`breaker`, `progress`, `hang`). `slow_start` and `backpressure` limit what an endpoint gets; `serving` is the
index of models.

Imported by: `balancer`, `commands`, `control`, `driver`, `extras`, `net`, `observed`, `placing`, `policies`,
`processes`, `proxy`, `queue`, `replicas`, `restarts`, `scaling`, `sim`, `sleeping`, `workers`. Never: which of the
endpoints that may be asked is best.
"""
