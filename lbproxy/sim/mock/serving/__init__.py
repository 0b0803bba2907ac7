# SPDX-License-Identifier: Apache-2.0
"""Handlers of the simulated server: requests in, work for the engine, responses and streams out.

`driver` owns the engine and its one timer; `desk` is what every handler needs (options, adapters, ids); the others
are routes with their handlers, one module for each kind of API. What is said stands in `sim.mock.apis`.

Imported by: `mock`, `mock/connectors`. Never: the shape of a body.
"""
