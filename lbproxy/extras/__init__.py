# SPDX-License-Identifier: Apache-2.0
"""What needs packages that lbproxy itself does without: imported only once the settings ask for it.

`tracing` decides whether requests are traced; `traces` sends them to a collector, `spans` makes OpenTelemetry spans of
their records. `replication` exchanges requests with other replicas over a `store`; `redis_store` is one of Redis.
`kv_events` has the KV events of endpoints read: a `kv_feed` for each, which share the time that `kv_pace` gives them,
over `kv_sockets` of ZMQ.

Imported by: `commands`, `demo`, `processes`. Never: anything that a request waits for.
"""
