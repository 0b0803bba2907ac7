"""What was learned, as plain data that survives a restart: exported, checked and taken over again.

`pieces` exports pool, endpoints and prefixes as a sequence of small mappings, `reading` is the one place that validates
such data, `restoring` gives it to a new pool with its age, and `lines` turns pieces into lines of text and back.

Imported by: `balancer`, `control`, `endpoints`, `extras`, `sim`. Never: files, connections, or the clock.
"""
