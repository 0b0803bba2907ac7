# SPDX-License-Identifier: Apache-2.0
"""Settings read from text, and what is said of them if they are wrong."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lbproxy.config.parse import parse
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings

MINIMAL = "endpoints: [http://gpu-1:8000]\n"


def read(text: str, environ: Mapping[str, str] | None = None) -> Settings:
    return parse(text, environ=environ or {})


def problems(text: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """All of them. Fails the test if there are none."""
    with pytest.raises(ConfigError) as error:
        read(text, environ)
    return error.value.problems


def only_problem(text: str) -> str:
    """Fails the test unless there is exactly one."""
    (one,) = problems(text)
    return one
