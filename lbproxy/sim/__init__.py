# SPDX-License-Identifier: Apache-2.0
"""A model of continuous-batching LLM servers, in virtual time or behind HTTP. Only `sim.mock` does I/O.

    engine -> workloads -> fleet -> figures        engine -> mock

It stands on core alone; `demo`, `lbproxy sim`, `lbproxy mock`, the tests and the benchmarks use it.
"""
