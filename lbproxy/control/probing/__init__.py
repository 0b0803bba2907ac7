# SPDX-License-Identifier: Apache-2.0
"""Reads each endpoint's health, models and metrics. One supervised loop each (`prober`, `scraper`); `roles` warns of
roles that do not fit together.

What comes back is handed to the Balancer as it is; `inspect` is the same, once, for `lbproxy check`.

Imported by: `commands`, `discovery`, `processes`, `telemetry`. `discovery.watch` starts and ends the loops. Never:
verdicts, which are the Balancer's.
"""
