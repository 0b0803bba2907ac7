"""TLS towards clients: what a certificate and its key become."""

from __future__ import annotations

import ssl


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """TLS 1.2 and 1.3 with the chain and the key in two PEM files, which are read here and not again.

    Reloading makes another one: a context that failed to load half of a new pair would be good for nothing. Ciphers are
    OpenSSL's as Python chooses them: forward secrecy only, no compression, no renegotiation. Raises OSError, also for
    what is wrong with the contents (ssl.SSLError).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, password=lambda: b"")  # without this, OpenSSL asks on the terminal
    return context
