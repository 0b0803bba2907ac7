# SPDX-License-Identifier: Apache-2.0
"""One simulated server, sans-io: continuous batching, a paged KV cache with prefix reuse, LoRA slots, ranks.

`engine` behaves like vLLM V1 where routing can tell; `link` joins engines of which some
prefill and others decode (`handover` is what happens in each of them); `fixed` takes so long whatever it gets;
`presets` has the hardware.

Imported by: `commands`, `fleet`, `mock`, `mock/apis`, `mock/connectors`, `mock/serving`, `workloads`. Never: clocks,
HTTP, balancers.
"""
