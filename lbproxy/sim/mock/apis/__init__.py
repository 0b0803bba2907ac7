# SPDX-License-Identifier: Apache-2.0
"""The words of every API that the simulated server speaks, without the wire: bodies in, bodies and stream events out.

`fields` checks untrusted input and words refusals; `conversation` turns the messages of three APIs into one prompt;
`call` says what a request is for the engine; the other modules are one API each. Pure, and deterministic but for ids
and times, which are passed in.

Imported by: `mock`, `mock/connectors`, `mock/serving`. Never: a connection, a clock.
"""
