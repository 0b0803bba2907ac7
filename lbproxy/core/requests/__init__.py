"""What clients ask for and what they get: request bodies and forms, prompts and their keys, SSE, outcomes, retries.

Everything here is bytes from outside, or a value made of them; nothing here knows an endpoint. What is not trusted is
validated here and nowhere else: an `LbError` says what is wrong with a request.

In: anybody. Never: state that outlives a request, but for the budget of retries (`retry`).
A new API (another wire format) begins here, with a module beside `openai`.
"""
