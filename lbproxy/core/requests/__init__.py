# SPDX-License-Identifier: Apache-2.0
"""What clients ask for and what they get: request bodies and forms, prompts and their keys, outcomes, retries.

Everything here is bytes from outside, or a value made of them, and independent of endpoints. Untrusted input is
validated here and nowhere else: an `LbError` says what is wrong with a request.

Imported by: `balancer`, `caches`, `commands`, `control`, `driver`, `endpoints`, `engines`, `extras`, `knowledge`,
`net`, `observed`, `placing`, `policies`, `proxy`, `queue`, `replicas`, `responses`, `restarts`, `saved`, `scaling`,
`sim`, `sleeping`, `workers`. Never: state that outlives a request, except the retry budget (`retry`). A new API
(another wire format) starts here, with a module like `openai`.
"""
