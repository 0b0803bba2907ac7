"""The balancer: it gets events and the current time, and decides where each request goes.

Pure: no clock, no event loop, no sockets, no logging, no chance of its own. The proxy, the simulation and the tests are
drivers of the same object (`core.balancer.Balancer`), which alone stands at this level. The rooms below it, in the
order in which they may import each other (tests/test_architecture.py):

    requests -> engines -> caches -> capacity -> knowledge -> endpoints -> policies -> queue -> observed -> balancer

What a driver may use of them: plain values and pure functions (`requests`, `engines`, `endpoints.endpoint`,
`observed`). State is changed through the Balancer only.
"""
