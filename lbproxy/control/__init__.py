# SPDX-License-Identifier: Apache-2.0
"""The control plane: monitoring of the endpoints, and telemetry and administration of lbproxy itself.

    probing -> discovery -> telemetry -> admin

It never sees a client's request: it meets the data plane in `driver` and `processes` alone.
"""
