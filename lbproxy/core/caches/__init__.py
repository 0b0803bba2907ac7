"""What each endpoint is predicted to have loaded: prefixes of prompts, and LoRA adapters.

`prefix_index` is the tree of all prompts that were sent somewhere, with the endpoints that should still have them;
`cache_size` learns how much one keeps, `cache_loss` notices that it lost everything; `adapters` is the same for LoRA.

In: `knowledge`, which owns one of each for an endpoint. Never: prices, or what a request should do.
"""
