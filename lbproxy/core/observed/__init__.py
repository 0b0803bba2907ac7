# SPDX-License-Identifier: Apache-2.0
"""What the balancer shows of itself: one record for each request, a snapshot of the pool, what was learned, traces.

Plain values that do not change: metrics, logs, traces, the dashboard and reports are made of these and of nothing else.

Imported by: `app`, `balancer`, `control`, `data_plane`, `extras`, `processes`, `proxy`, `request_runtime`, `runtime`,
`workers`. Never: state that decides something.
"""
