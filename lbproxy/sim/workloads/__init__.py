"""What simulated clients send: jobs with arrival times, prompts without text, recorded traffic.

`catalogue` has the workloads that can be named. A new one is a function there.

In: `fleet`, the demo. Never: servers.
"""
