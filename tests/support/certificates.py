# SPDX-License-Identifier: Apache-2.0
"""Certificates for servers of tests: of `localhost`, 127.0.0.1, `vllm.test`, `gpu-1.llm.test`, `gpu-2.llm.test`."""

from __future__ import annotations

import ssl
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fixtures" / "tls"
CA = FOLDER / "ca.pem"
OTHER_CA = FOLDER / "other-ca.pem"
"""Signed no certificate here."""


def server_context(names: list[str | None] | None = None) -> ssl.SSLContext:
    """What a server needs to speak TLS. `names` gets the name that each client asks for (SNI)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(FOLDER / "server.pem")
    if names is not None:
        context.sni_callback = lambda _, name, __: names.append(name)
    return context
