# SPDX-License-Identifier: Apache-2.0
"""The admin listener: /healthz, /readyz, /metrics, the API under /admin/ and the dashboard.

`server` serves, `api` has the routes, `state` makes the JSON, `openapi` describes it, `access` says who may use what,
`made_token` makes what proves it where the settings do not say, `key_files` reads the files of keys and certificates.

Imported by: `commands`, `demo`, `processes`. Never: requests of the data plane; it has a port of its own.
"""
