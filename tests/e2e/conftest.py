"""What processes and real clients run with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.certificates import OTHER_CA


@pytest.fixture(scope="session", autouse=True)
def _few_authorities() -> Iterator[None]:
    """Let default TLS contexts trust one authority, which signed nothing.

    httpx makes such a context for each `httpx.get` and each SDK client; reading the system's authorities takes 25 ms.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(OTHER_CA))
        yield
