# SPDX-License-Identifier: Apache-2.0
"""What engines report: metrics pages, load reports in headers, the pages on which they describe themselves.

Text in, `LoadMetrics` out. `dialects` has one table for each engine, built in or from the settings: a new engine is a
new table. Pages are not trusted: they are bounded, and a value that cannot be read is None, not 0.

Imported by: `balancer`, `commands`, `control`, `driver`, `endpoints`, `extras`, `knowledge`, `policies`, `processes`,
`proxy`, `scaling`, `sim`, `sleeping`, `workers`. Never: what the values mean for routing, or when they are stale.
"""
