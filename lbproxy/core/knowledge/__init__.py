"""What is learned of speed and work: of one endpoint (`load_model`), and of all together (`pool_model`).

Each placed request is a `Placement` until it ends; from first bytes, gaps and usage the models learn how fast prompts
are prefilled and tokens decoded, how long prompts and responses are, and what is there now.

In: the Balancer tells, policies read. Never: which endpoint is chosen, or whether it is healthy.
"""
