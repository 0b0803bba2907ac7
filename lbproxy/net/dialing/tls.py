"""TLS towards the endpoints: what verifies their certificates, and why a handshake failed.

Certificates are text here: whoever read them from a file has told the user what was wrong with it. Invariant: nobody is
trusted whom the settings do not name; by default those are whom this machine trusts, and the name is checked.
"""

from __future__ import annotations

import ssl
from functools import lru_cache


@lru_cache(maxsize=1024)  # to load what this machine trusts takes 20 ms
def client_context(ca: str | None, verify: bool) -> ssl.SSLContext:
    """What endpoints are reached with whose certificates are signed by `ca` (PEM; None = whom this machine trusts).

    Raises ValueError if `ca` holds no certificate.
    """
    try:  # an empty text is not None: create_default_context(cadata="") would trust everybody whom the machine does
        context = ssl.create_default_context(cadata=None if ca is None else ca or "-")
    except ssl.SSLError as error:
        raise ValueError(f"no certificates in PEM form ({error.reason or error})") from None
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def handshake_problem(error: OSError) -> str | None:
    """Why a handshake failed, in short; None if that is not what `error` is about."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return None
