"""What the balancer shows of itself: one record for each request, a snapshot of the pool, what was learned, traces.

Plain values, safe to keep: metrics, logs, traces, the dashboard and reports are made of these and of nothing else.

In: anybody. Never: state that decides something.
"""
