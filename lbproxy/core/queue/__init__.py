# SPDX-License-Identifier: Apache-2.0
"""Requests that wait, in which order, and the moment at which one is placed.

`ticket` is a request's place in the balancer; `candidates` says who may be asked, and `choice` where it goes, or why
it waits or ends; `waiting_queue` keeps waiting requests, `dispatcher` wakes them, and `overdue` those that may go to a
higher tier; `flow` and `flows` share capacity between clients;
`queue_overload` measures the pace; `stored_responses` knows which endpoint stores which response.

Imported by: `balancer`, `commands`, `control`, `driver`, `extras`, `observed`, `placing`, `proxy`, `replicas`,
`restarts`, `sim`, `sleeping`, `workers`. Never: the properties of endpoints (`policies` and `endpoints` have them).
"""
