# SPDX-License-Identifier: Apache-2.0
"""The balancer: it gets events and the current time, and decides where each request goes.

It is pure: it reads no clock, has no event loop, no sockets and no logging, and draws random numbers only from a
generator that it is given. The proxy, the simulation and the tests drive the same object, `core.balancer.Balancer`,
which is the only module at this level. Below are its packages, in the order in which they may import each other
(tests/test_architecture.py checks it):

    requests -> engines -> caches -> capacity -> knowledge -> endpoints -> policies -> queue -> observed -> balancer

A driver may use plain values and pure functions of `requests`, `engines`, `endpoints.endpoint` and `observed`. It
changes state through the Balancer only.
"""
