# SPDX-License-Identifier: Apache-2.0
"""The CORS fields that let a page of another origin read a response (Fetch standard). Pure.

Field lines are made once for each configured origin; a request costs a look-up. Credentials that a browser adds by
itself, such as cookies, are never allowed: pages send API keys themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from lbproxy.config.sections.cors import ANY_ORIGIN
from lbproxy.core.requests.openai import REASON_FIELD
from lbproxy.proxy.request.headers import REPLACES_CORS

MAX_AGE_S: Final = 600
"""How long a browser may cache a preflight: about as long as an operator accepts to wait for a change."""
_METHODS: Final = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_EXPOSED: Final = ", ".join(
    (
        *("x-request-id", "x-lbproxy-attempts", "x-lbproxy-endpoint", "x-lbproxy-tier", "x-lbproxy-prefill"),
        *("x-lbproxy-explain", "x-lbproxy-model"),
        *(REASON_FIELD, "x-should-retry", "retry-after"),
        *(f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in ("limit", "remaining", "reset")),
        *(
            f"anthropic-ratelimit-{what}-{name}"
            for what in ("requests", "tokens")
            for name in ("limit", "remaining", "reset")
        ),
    )
)
_FIELD_NAMES: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z, ]{1,4096}")


class Cors:
    """The configured origins, at least one."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._fields: dict[str | None, str] = {}
        """Field lines, by origin."""
        self.for_others = REPLACES_CORS
        """The field lines for an origin that is not allowed, or not known."""
        if ANY_ORIGIN in origins:
            self.for_others = _allowing(ANY_ORIGIN)
        else:
            self._fields = {origin: _allowing(origin) for origin in origins}

    def fields_for(self, origin: str | None) -> str:
        """Field lines for a response to a page of `origin`, each with its CRLF; never empty. None = not from a page."""
        return self._fields.get(origin, self.for_others)

    def preflight(self, method: str, headers: Mapping[str, str]) -> str | None:
        """Field lines of the response to a preflight request; None: it is not one.

        `headers`: of the request, by names in any case.
        """
        origin = headers.get("Origin")
        if method != "OPTIONS" or origin is None or "Access-Control-Request-Method" not in headers:
            return None
        fields = self.fields_for(origin)
        if fields == REPLACES_CORS:
            return fields
        wanted_fields = headers.get("Access-Control-Request-Headers", "")
        if wanted_fields and _FIELD_NAMES.fullmatch(wanted_fields):  # '*' would not include Authorization
            fields += f"Access-Control-Allow-Headers: {wanted_fields}\r\n"
        return f"{fields}Access-Control-Allow-Methods: {_METHODS}\r\nAccess-Control-Max-Age: {MAX_AGE_S}\r\n"


def _allowing(origin: str) -> str:
    fields = f"Access-Control-Allow-Origin: {origin}\r\nAccess-Control-Expose-Headers: {_EXPOSED}\r\n"
    return REPLACES_CORS + fields
