# SPDX-License-Identifier: Apache-2.0
"""What simulated clients send: jobs with arrival times, prompts without text, recorded traffic.

`catalogue` has the workloads that can be named. A new one is a function there.

Imported by: `commands`, `demo`, `fleet`. Never: servers.
"""
