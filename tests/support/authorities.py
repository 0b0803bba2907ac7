# SPDX-License-Identifier: Apache-2.0
"""For tests that start processes or real clients: imported by the conftest of their folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.certificates import OTHER_CA


@pytest.fixture(scope="session", autouse=True)
def few_authorities() -> Iterator[None]:
    """Let default TLS contexts trust one authority, which signed nothing.

    httpx makes such a context for each `httpx.get` and each SDK client, and aiohttp when it is imported; reading the
    system's authorities takes 25 to 50 ms.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(OTHER_CA))
        yield
