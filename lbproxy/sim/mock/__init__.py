"""The simulated server behind HTTP: `lbproxy mock`. What a vLLM server looks like from outside, faults included.

`openai_api`, `adapters`, `text`, `exposition` and `description` are its words (pure), `http` serves them, `faults` says
what goes wrong and `sabotage` does it to the connections.

In: the command line, the demo, the tests. Never: a balancer.
"""
