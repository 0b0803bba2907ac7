# SPDX-License-Identifier: Apache-2.0
"""lbproxy as one process (`app`), or as several (`workers` above 1): a supervisor, one balancer process, and workers.

`app.Proxy` is the Balancer with the control plane, and a `Plane`: in one process a `data_plane.DataPlane`, which serves
clients. With several, the supervisor (`supervisor`) holds the listening sockets, starts the others and starts them
again, and passes on signals. `child` is what it starts: the balancer process (`balancing`), an `app.Proxy` whose
`Plane` (`plane`) is the workers; a worker (`worker`), a `DataPlane` with a RemoteRuntime; or a standby (`standby`),
which may become either. Each has a control link to the supervisor (`control`). `process` is what a process asks of
Python and of the system, `settings_file` reads the file that all of them run by.

Imported by: `commands`, `demo`. Never: a decision about a request, or bytes of one.
"""
