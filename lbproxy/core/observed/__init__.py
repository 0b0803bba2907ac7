# SPDX-License-Identifier: Apache-2.0
"""What the balancer shows of itself: one record for each request, a snapshot of the pool, what was learned, traces.

Plain values that do not change: metrics, logs, traces, the dashboard and reports are made of these and of nothing else.

Imported by: `balancer`, `control`, `driver`, `extras`, `placing`, `processes`, `proxy`, `workers`. Never: state that
decides something.
"""
