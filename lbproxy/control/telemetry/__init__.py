# SPDX-License-Identifier: Apache-2.0
"""What is measured and written down: Prometheus families, the log, the last requests, the last minutes, memory.

Sinks of records and transitions; gauges are read from a snapshot when somebody scrapes. Only `telemetry`, `families`
and `endpoint_families` know prometheus_client.

Imported by: `admin`, `processes`. `runtime` hands records over. Never: decisions. A new metric goes to `families` or
`telemetry`, and into docs/metrics.md by a test.
"""
