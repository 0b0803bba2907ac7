# SPDX-License-Identifier: Apache-2.0
"""What /metrics says: families of Prometheus samples, made of snapshots and counts when somebody scrapes.

`common` has the makers of families and those of the processes; the others have those of their subjects. `requests`
counts each request that ended, with `placements`; `features` has what not every fleet has; `histogram` counts values.
`control.telemetry` reads all.

Imported by: `admin`, `processes`, `saving`, `sleeping`, `telemetry`. Never: the event loop.
"""
