# SPDX-License-Identifier: Apache-2.0
"""The data plane: clients in front, endpoints behind, one exchange for each request.

    request -> exchange -> front

It does not monitor endpoints: it asks the Balancer by way of `runtime`, and reports events to it.
"""
