# SPDX-License-Identifier: Apache-2.0
"""The dashboard: one page that needs nothing but the admin API, put together from the files beside this one.

Its Content-Security-Policy lets it be nothing else: style and script are named by their hash, no text becomes HTML
(trusted types), no form, frame or image leads anywhere. It holds nothing of this lbproxy, so it needs no guarding; what
it then asks for does (control/admin/access.py).
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib.resources import files

from aiohttp import web

PATH = "/dashboard"
SCRIPTS = ("nodes.js", "live.js", "fleet.js", "picture.js")
"""One script; in this order."""


class Dashboard:
    """Its handlers."""

    def __init__(self) -> None:
        folder = files(__package__)
        page, style, *scripts = ((folder / name).read_text("utf-8") for name in ("page.html", "style.css", *SCRIPTS))
        script = "".join(scripts)
        page = page.replace("/* style */", style).replace("/* script */", script)
        policy = (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
            "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'; trusted-types 'none'"
        )
        self._page = page.encode()
        self._headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Opener-Policy": "same-origin",
        }

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/", self._lead)
        router.add_get(PATH, self._show)

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page, headers=self._headers)

    async def _lead(self, _: web.Request) -> web.Response:
        """Relative, so that it is right behind a proxy's prefix too."""
        return web.Response(status=302, headers={"Location": PATH.removeprefix("/")})


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
