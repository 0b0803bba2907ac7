# SPDX-License-Identifier: Apache-2.0
"""What is learned of speed and work: of one endpoint (`load_model`), and of all together (`pool_model`).

Each placed request is a `Placement` until it ends. From first bytes, gaps and usage the models learn how fast prompts
are prefilled and tokens decoded, how long prompts and responses are, and how much work is in progress.

Imported by: `endpoints`, `observed`, `policies`, `queue`, `saved`, `scaling`. The Balancer reports events through
`EndpointState.load`; policies only read. Never: choice of endpoints, or health.
"""
