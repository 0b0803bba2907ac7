# SPDX-License-Identifier: Apache-2.0
"""What to type where an extra's packages are missing."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote


def needs(extra: str) -> str:
    """The rest of a sentence whose subject wants the `extra`; its command installs what runs here again, with it."""
    return f"needs packages that are not installed: pip install '{_requirement(extra)}'"


def _requirement(extra: str) -> str:
    # Where it came from (PEP 610): a folder, a wheel's address, or an index, which writes no such file.
    try:
        source = json.loads(distribution("lbproxy").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return f".[{extra}]"
    url = str(source.get("url", ""))
    if "dir_info" in source:
        return f"{unquote(url.removeprefix('file://'))}[{extra}]"
    return f"lbproxy[{extra}] @ {url}" if url else f"lbproxy[{extra}]"
