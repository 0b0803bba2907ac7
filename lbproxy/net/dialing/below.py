# SPDX-License-Identifier: Apache-2.0
"""Paths below an endpoint's URL, if that has a path of its own, as in the `base_url` of OpenAI's SDK.

`https://host/openai/v1` and `https://host/v1beta/openai` stand for the client's `/v1`: a segment with a version is in
them. `https://host/gpu-1` has none: a server's `/v1` is below it. All other paths of the server, such as `/health`, are
beside its `/v1`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

_VERSION: Final = re.compile(r"v[0-9]+[a-z0-9]*")
_V1: Final = "/v1/"


def below(base_url: str, target: str) -> str:
    """The request target at an endpoint, for a path (with or without query) as model servers have them."""
    before = prefixes(base_url)
    if before is None:
        return target
    beside, api = before
    return f"{api}/{target[len(_V1) :]}" if target.startswith(_V1) else beside + target


@lru_cache(maxsize=4096)  # once per request; URLs come from settings and discovery only
def prefixes(base_url: str) -> tuple[str, str] | None:
    """What is put before a path, and in place of `/v1`. None: the URL has no path."""
    path = "" if base_url.startswith("unix:") else urlsplit(base_url).path.rstrip("/")
    if not path:
        return None
    versions = [_VERSION.fullmatch(segment) is not None for segment in path.split("/")]
    api = path if any(versions) else f"{path}/v1"
    return path.rpartition("/")[0] if versions[-1] else path, api
