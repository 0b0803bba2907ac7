# SPDX-License-Identifier: Apache-2.0
"""lbproxy as several processes (`workers` above 1): a supervisor, one balancer process, and worker processes.

The supervisor (`supervisor`) holds the listening sockets, starts the others and starts them again, and passes on
signals. `child` is what it starts: the balancer process (`balancing`), an `app.Proxy` whose `Plane` (`plane`) is the
workers; a worker (`worker`), a `DataPlane` with a RemoteRuntime; or a standby (`standby`), which may become either.
Each has a control link to the supervisor (`control`).

Imported by: `cli`, `demo`. Never: a decision about a request, or bytes of one.
"""
