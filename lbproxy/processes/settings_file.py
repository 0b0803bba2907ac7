# SPDX-License-Identifier: Apache-2.0
"""Reads a file of settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from lbproxy.config.parse import parse
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings

MAX_SETTINGS_BYTES: Final = 1 << 20


def read_text(path: str) -> str:
    """The text of a file of settings, of at most one byte over the limit. Raises ConfigError, OSError."""
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_SETTINGS_BYTES + 1).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(path, ["there is no such file"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, [f"not UTF-8: {error.reason} at byte {error.start}"]) from None


def parse_text(text: str, path: str) -> Settings:
    """The settings in the text of a file. Raises ConfigError."""
    return parse(text, environ=os.environ, source=path, folder=os.path.dirname(path))
