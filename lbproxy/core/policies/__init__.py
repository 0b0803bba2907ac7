# SPDX-License-Identifier: Apache-2.0
"""Which endpoint is best for a request: every policy, and how its decisions are explained.

`policy` is the interface: a list of candidates in, a list of costs out. `adaptive` is the default; `registry` has the
names of all policies. A new policy is a class here and a line in `registry`.

Imported by: `balancer`, `commands`, `control`, `driver`, `extras`, `observed`, `processes`, `proxy`, `queue`,
`workers`. Never: counting, placing, waiting; a policy keeps no state about a request.
"""
