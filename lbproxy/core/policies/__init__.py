"""Which endpoint is best for a request: every policy, and how its decisions are explained.

`policy` is the interface: a list of candidates in, a list of costs out. `adaptive` is the default; `registry` has the
names of all. A new policy is a class here and a line in `registry`.

In: `queue.choice`. Never: counting, placing, waiting; a policy remembers nothing of a request.
"""
