# SPDX-License-Identifier: Apache-2.0
"""The dashboard's page as it is served: whole in itself, closed to strangers, open where it must ask for a token."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx
from aiohttp import web

from lbproxy.config.sections.access import Secret
from lbproxy.control.admin.access import PAGE, AdminAccess, Handler
from lbproxy.control.admin.dashboard.page import PATH, Dashboard
from lbproxy.core.requests.outcome import LbError
from tests.support.aio import run

SECRET = Secret.read("correct-horse-battery-staple")


@web.middleware
async def refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Those of the guard, as the admin listener answers them."""
    try:
        return await handler(request)
    except LbError as error:
        return web.Response(status=error.outcome.value.status)


def answers(token: Secret | None = None, path: str = PATH, method: str = "GET", **headers: str) -> httpx.Response:
    async def main() -> httpx.Response:
        app = web.Application(middlewares=[refusals, AdminAccess(token).middleware])
        Dashboard().add_to(app.router)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
                return await client.request(method, path, headers=headers)
        finally:
            await runner.cleanup()

    return run(main())


def policy(answer: httpx.Response) -> dict[str, str]:
    parts = [one.strip().partition(" ") for one in answer.headers["content-security-policy"].split(";")]
    return {name: value for name, _, value in parts}


def test_it_is_one_page_that_names_its_script_and_style_by_hash() -> None:
    answer = answers()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy(answer)[directive] == f"'sha256-{digest}'"
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]*(?:src|href)=[\"'](?!data:)", answer.text)
    assert not re.findall(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", answer.text)
    assert policy(answer) | {"script-src": "", "style-src": ""} == {
        "default-src": "'none'",
        "script-src": "",
        "style-src": "",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_the_root_leads_to_it_also_behind_a_prefix() -> None:
    answer = answers(path="/")
    assert (answer.status_code, answer.headers["location"]) == (302, "dashboard")


def test_with_a_token_the_page_is_open_and_nothing_else() -> None:
    """A browser cannot send a token for a page; the page then asks for it."""
    for path in PAGE:
        for method in ("GET", "HEAD"):
            assert answers(SECRET, path, method).status_code in {200, 302}
        assert answers(SECRET, path, "POST").status_code == 401
    for path in ("/admin/state", f"{PATH}/x", "/admin/events"):
        assert answers(SECRET, path).status_code == 401
    assert PATH in PAGE


def test_without_a_token_it_is_for_this_machine_like_the_rest() -> None:
    assert answers().status_code == 200
    assert answers(forwarded="for=10.0.0.1").status_code == 403
    assert answers(host="evil.example").status_code == 403
