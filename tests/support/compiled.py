# SPDX-License-Identifier: Apache-2.0
"""Whether the lbproxy under test is compiled (setup.py), as it is in `make compiled`'s folder."""

from __future__ import annotations

import pytest

from lbproxy.core import balancer

COMPILED = not balancer.__file__.endswith(".py")

interpreted = pytest.mark.skipif(COMPILED, reason="replaces methods, or inherits, which compiled classes do not allow")
