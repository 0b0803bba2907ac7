# SPDX-License-Identifier: Apache-2.0
"""Where the set of endpoints comes from: the settings, files, DNS, the admin API.

`discovery` makes complete sets of them; `known_names` keeps what is believed of each DNS name, `resolver`
and `nameservers` ask; `overlay` has what the admin API added; `membership` tells the balancer, and runs the
loops of endpoints that come and go.

Imported by: `admin`, `commands`, `families`, `processes`, `telemetry`. Never: requests, or an endpoint's health.
"""
