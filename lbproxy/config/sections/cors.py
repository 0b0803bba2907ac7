# SPDX-License-Identifier: Apache-2.0
"""Settings for web pages that call lbproxy from a browser."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from lbproxy.config.section import Section
from lbproxy.config.values import expected, rule

MAX_ORIGINS = 100
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]{0,30})://(?:[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")
_USUAL_PORTS = {("http", ":80"), ("https", ":443")}


def _check_origin(value: str) -> str:
    """As browsers write it: in lower case, and without the scheme's usual port."""
    if value == ANY_ORIGIN:
        return value
    match = _ORIGIN.fullmatch(value.lower())
    if match is None:
        raise expected("'*', or an origin such as https://chat.example or http://localhost:3000, without a path")
    return match[0].removesuffix(match[2]) if (match[1], match[2]) in _USUAL_PORTS else match[0]


class CorsSettings(Section):
    """Web pages of other origins that may call lbproxy from a browser."""

    origins: Annotated[
        tuple[Annotated[str, AfterValidator(_check_origin)], ...],
        Field(json_schema_extra={"maxItems": MAX_ORIGINS, "items": {"type": "string"}}),
    ] = ()
    """Such as https://chat.example, or '*' for all. None = endpoints' own CORS headers pass."""

    _few = rule("origins", f"at most {MAX_ORIGINS} origins", lambda origins, _: len(origins) > MAX_ORIGINS)
    _any_alone = rule(
        "origins", "'*' alone, which is every origin", lambda origins, _: ANY_ORIGIN in origins and len(origins) > 1
    )
