"""One simulated server, sans-io: continuous batching, a paged KV cache with prefix reuse, LoRA slots, ranks.

`engine` behaves like vLLM V1 where routing can tell; `fixed` takes so long whatever it gets; `presets` has the
hardware.

In: `fleet` and `mock` drive it. Never: clocks, HTTP, balancers.
"""
