# SPDX-License-Identifier: Apache-2.0
"""What several lbproxies before the same endpoints tell each other, so that each counts the others' requests as well.

`batches` has the events and their form as bytes, and validates what arrives; `journal` gathers this replica's events;
`peers` applies those of the others to the endpoints' models, caches and flows.

Imported by: `balancer`, `control`, `extras`, `placing`, `sim`. Never: connections, the clock, or which way batches
travel.
"""
