# SPDX-License-Identifier: Apache-2.0
"""The admin listener: /healthz, /readyz, /metrics, the API under /admin/ and the dashboard.

`server` serves, `api` has the routes, `state` makes the JSON, `openapi` and `schemas` describe it, `feed` sends it once
a second, `access` says who may use what, `key_files` reads the files of keys and certificates.

Imported by: `app`, `check`, `data_plane`, `processes`. Never: requests of the data plane; it has a port of its own.
"""
