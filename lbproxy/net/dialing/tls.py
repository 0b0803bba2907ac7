# SPDX-License-Identifier: Apache-2.0
"""TLS to the endpoints: the verification of their certificates, and why a handshake failed.

Certificates are text here: the reader of the file has reported what was wrong with it. Invariant: only configured
authorities are trusted, by default those that this machine trusts; and the name is checked.
"""

from __future__ import annotations

import ssl
from functools import lru_cache


@lru_cache(maxsize=1024)  # loading the trusted certificates of this machine takes 20 ms
def client_context(ca: str | None, verify: bool) -> ssl.SSLContext:
    """The TLS context for endpoints whose certificates are signed by `ca` (PEM; None = those that this machine trusts).

    Raises ValueError if `ca` contains no certificate.
    """
    try:  # an empty text is not None: create_default_context(cadata="") would trust the authorities of the machine
        context = ssl.create_default_context(cadata=None if ca is None else ca or "-")
    except ssl.SSLError as error:
        raise ValueError(f"no certificates in PEM form ({error.reason or error})") from None
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def handshake_problem(error: OSError) -> str | None:
    """Why a handshake failed, in short; None if `error` is about something else."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {(error.reason or str(error)).lower().replace('_', ' ')}"
    return None
