# SPDX-License-Identifier: Apache-2.0
"""Every case takes both ways in: the fast lane, and aiohttp for everything."""

from tests.proxy.conftest import way

__all__ = ["way"]
