# SPDX-License-Identifier: Apache-2.0
"""How much more an endpoint can take now, and how long a request waits there (`room`).

A `Room` consists of what limits an engine: `slots` (requests that run at once), `space` (its KV cache, where it reports
nothing), `lanes` (parallel prefills), the load of other clients (`others`), and the requests that are held for it
(`reservations`). Reported values overrule predicted ones. `trends` is for engines without reports, `opaque` for
requests whose work cannot be read.

Imported by: `control`, `endpoints`, `knowledge`, `queue`, `replicas`, `restarts`, `saved`, `scaling`, `sim`, `workers`.
`knowledge.load_model` owns a Room for each endpoint. Never: which request gets the room.
"""
