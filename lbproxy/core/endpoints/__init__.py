"""Which endpoints there are, and which may be asked: the set, the health machine, the circuit breaker, the index by
model.

`endpoint_set` owns each `EndpointState`; `judge` moves it through the states of `health` by what probes and requests
bring (`breaker`, `progress`, `hang`), `slow_start` and `backpressure` hold some back; `serving` knows who serves what.

In: the Balancer. Never: which of those that may be asked is best.
"""
