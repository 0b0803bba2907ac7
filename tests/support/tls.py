# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests: an authority of our own, certificates in files as users have them, and clients that check."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme

from lbproxy.control.admin.key_files import server_context

NAME = "127.0.0.1"


class Authority:
    """A certificate authority and what it issued."""

    def __init__(self) -> None:
        self.ca = trustme.CA()

    def write(self, folder: Path) -> tuple[Path, Path]:
        """A new certificate for NAME and its key, in `folder`, in place of those that stood there."""
        issued = self.ca.issue_cert(NAME)
        cert, key = folder / "cert.pem", folder / "key.pem"
        issued.private_key_pem.write_to_path(key)
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return cert, key

    def server(self, folder: Path) -> ssl.SSLContext:
        """A listener's context, as lbproxy makes it."""
        cert, key = self.write(folder)
        return server_context(str(cert), str(key))

    def client(self) -> ssl.SSLContext:
        """One that trusts this authority alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.ca.configure_trust(context)
        return context

    def client_file(self, folder: Path) -> Path:
        """The authority's own certificate."""
        path = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(path)
        return path
