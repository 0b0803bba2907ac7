# SPDX-License-Identifier: Apache-2.0
"""TLS for clients, from a certificate and its key."""

from __future__ import annotations

import ssl


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and 1.3 with the chain and the key in two PEM files, which are read here and not
    again.

    A reload makes a new context: one that failed to load half of a new pair would be unusable. Ciphers are OpenSSL's as
    Python chooses them: forward secrecy only, no compression, no renegotiation. Raises OSError, also for invalid
    contents (ssl.SSLError).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, password=lambda: b"")  # without this, OpenSSL prompts on the terminal
    return context
