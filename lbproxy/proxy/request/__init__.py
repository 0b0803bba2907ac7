# SPDX-License-Identifier: Apache-2.0
"""Reading a client's request, and what of it is forwarded. Nearly all of it is pure.

Heads and fields (`headers`, `plain`, `walk`), paths (`routes`), keys, origins (`cors`), the client's address
(`forwarding`), the model and the body to send (`reading`), and responses of lbproxy itself (`own_responses`).

Imported by: `exchange`, `front`, `processes`. Never: sockets. A new route is a row in `routes`.
"""
