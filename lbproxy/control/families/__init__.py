# SPDX-License-Identifier: Apache-2.0
"""What /metrics says: families of Prometheus samples, made of snapshots and counts when somebody scrapes.

`common` has the makers of families and those of the processes; `endpoints`, `replicas`, `kv_events`, `scaling` and
`splits` those of their subjects; `histogram` counts. What is counted, and when, is in `control.telemetry`.

Imported by: `admin`, `data_plane`, `processes`, `saving`, `sleeping`, `telemetry`. Never: the event loop.
"""
