# SPDX-License-Identifier: Apache-2.0
"""The wire: sockets that listen, connections that are dialled, HTTP/1.1 as a client of the endpoints.

    dialing -> connections        listening

Shared by the data plane and the probes. Never: which endpoint, or what a response means.
"""
