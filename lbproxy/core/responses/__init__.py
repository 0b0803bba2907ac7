# SPDX-License-Identifier: Apache-2.0
"""What endpoints send back, read while it passes: events of streams, usage, ids of stored objects, completeness.

Nothing of it is changed, and little is kept. Invariant: a value is read where the engine writes it. Text of a client
that a response repeats (a `user`, metadata, a token, the arguments of a tool) never counts as such a value.

Imported by: `proxy`. Never: requests, and what a response means for its endpoint. Another engine's own form of usage
goes into `usage`.
"""
