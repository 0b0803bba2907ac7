"""Reading a client's request, and what of it is forwarded. Nearly all of it is pure.

Heads and fields (`headers`, `plain`, `walk`), paths (`routes`), keys, origins (`cors`), who asks (`forwarding`), the
model and the body to send (`reading`), and the responses that lbproxy makes itself (`answers`).

In: `exchange` and `front`. Never: sockets. A new route is a row in `routes`.
"""
