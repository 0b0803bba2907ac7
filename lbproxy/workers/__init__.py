# SPDX-License-Identifier: Apache-2.0
"""Worker processes: several processes that relay bytes, and one balancer process that decides for all of them.

A worker has connections (`proxy/`) and a `RemoteRuntime`; the balancer process has the Balancer,
the control plane and a `WorkerServer`. They exchange `messages` over a Unix socket, many in one write (`link`). While
there is no balancer process, each worker places requests by what it was told last (`known`). What becomes of a worker's
requests when its link is lost depends on who comes next (`succession`). Which process dies and starts when is
decided in `lbproxy.processes`.

Imported by: `processes`. Never: HTTP, settings files, processes; a decision while the balancer process can make it.
"""
