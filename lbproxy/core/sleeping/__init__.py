# SPDX-License-Identifier: Apache-2.0
"""Which endpoints sleep, which are woken and which are put to sleep, and when.

`phase` is the state machine of one model server, `server` what is known of it;
`sleepers` owns all of it, and returns the orders that a driver carries out. An endpoint that is not awake is `dormant`
in its state (`core.endpoints.state`), so that it is no candidate.

Imported by: `balancer`, `control`, `observed`, `restarts`. Never: I/O; nor which of the endpoints that are awake is
best.
"""
