# SPDX-License-Identifier: Apache-2.0
"""What was learned, in a file: read at the start, written regularly and at the end (`state.file`).

`state_file` is the file with its lock: blocking, in threads. `keeper` decides when it is read and written, and exports
in steps between which requests are served. What is in the file, and what may be, is decided in `core.saved`.

Imported by: `admin`, `commands`, `processes`. Never: the request path.
"""
