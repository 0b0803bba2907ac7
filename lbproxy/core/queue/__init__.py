# SPDX-License-Identifier: Apache-2.0
"""Requests that wait, in which order, and the moment at which one is placed.

`ticket` is a request's place in the balancer; `choice` decides where it goes now, or why it waits or ends;
`waiting_queue` keeps waiting requests, and `dispatcher` wakes them; `flow` and `flows` share capacity between clients;
`queue_overload` measures the pace; `stored_responses` knows which endpoint stores which response.

Imported by: `balancer`, `control`, `extras`, `observed`, `placing`, `proxy`, `replicas`, `request_runtime`, `restarts`,
`runtime`, `sim`, `sim_cli`, `sleeping`, `workers`. Never: the properties of endpoints (`policies` and `endpoints` have
them).
"""
