# SPDX-License-Identifier: Apache-2.0
"""Carries out what the Balancer orders of servers that sleep: puts them to sleep, wakes them, has them started.

`calls` are the requests to a server or a webhook, in vLLM's words; `driver` asks each server whether it sleeps, and has
one loop that carries out orders and logs what servers became.

Imported by: `processes`. Never: which server is woken or put to sleep, and when (`core.sleeping` decides).
"""
