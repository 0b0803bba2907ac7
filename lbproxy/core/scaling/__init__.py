# SPDX-License-Identifier: Apache-2.0
"""How many endpoints each model needs: demand by model, what one endpoint can do, and the advice that follows.

`demand` counts requests as the Balancer places them; `capacity` has the formula, from rates and sizes to a number of
endpoints; `readings` makes these of what is offered, of the gauges of endpoints and of the steps of engines, by means
over time; `advice` looks at them once a second and keeps the number steady. For users: docs/autoscaling.md.

Imported by: `balancer`, `control`, `observed`, `placing`. Never: a decision about a request.
"""
