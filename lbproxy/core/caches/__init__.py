# SPDX-License-Identifier: Apache-2.0
"""What each endpoint is predicted to have loaded: prefixes of prompts, and LoRA adapters.

`prefix_index` is the tree of all prompts that were sent to endpoints, with the endpoints that should still have them
cached; `cache_size` learns the size of a cache, `cache_loss` detects that a cache was lost; `adapters` predicts loaded
LoRA adapters.

Imported by: `balancer`, `endpoints`, `extras`, `knowledge`, `policies`, `saved`. `knowledge` owns one of each for an
endpoint. Never: prices or decisions.
"""
