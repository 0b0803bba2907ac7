# SPDX-License-Identifier: Apache-2.0
"""What was learned and used, as plain data that survives a restart: exported, checked and taken over again.

`pieces` exports pool, endpoints and prefixes, what was used of limits and how long wakes took, as a sequence of small
mappings; `reading` is the one place that validates such data, and reads and writes it as lines of text; `restoring`
gives what was learned to a new pool with its age. `core.restarts` is the owner of the rest.

Imported by: `commands`, `control`, `endpoints`, `extras`, `processes`, `restarts`, `sim`, `sleeping`. Never: files,
connections, or the clock.
"""
