# SPDX-License-Identifier: Apache-2.0
"""The simulated server behind HTTP: `lbproxy mock`. What a vLLM server looks like from outside, faults included.

`apis/`, `adapters`, `text`, `exposition` and `families` are its words (pure), `http` and `serving/` serve them,
`faults` says what goes wrong and `sabotage` does it to the connections.

Imported by: `commands`, `demo`, `mock/apis`, `mock/connectors`, `mock/serving`. Never: a balancer.
"""
