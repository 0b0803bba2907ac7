# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser: seen, live, steered, honest while lbproxy is away, deaf to what names say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from aiohttp import web

from lbproxy.control.admin.dashboard.page import Dashboard
from lbproxy.control.admin.made_token import dashboard_link
from tests.support.aio import run
from tests.support.browser import needs_browser, page
from tests.support.fleet import MODEL, fleet
from tests.support.process import Process, changing, lbproxy

pytestmark = [needs_browser, pytest.mark.timeout(300)]

JSON = {"content-type": "application/json"}
DASH = "\u2013"
TOKEN = "0123456789abcdef0123"
ROW = "[...document.querySelectorAll('#endpoints tbody tr')].find((row) => row.cells[0].innerText.startsWith('{}'))"
LIVE = "document.getElementById('connection-text').textContent === 'Live'"
STALE = "document.getElementById('connection-text').textContent.startsWith('Stale')"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    with fleet(3, speed=20) as urls:
        yield urls


def named(urls: list[str]) -> list[str]:
    return [f"{{url: '{url}', name: gpu-{n}}}" for n, url in enumerate(urls, 1)]


def link(admin: str) -> str:
    """What `lbproxy dashboard` prints."""
    return dashboard_link(admin, changing(admin)["authorization"].removeprefix("Bearer "))


def state_is(name: str, state: str) -> str:
    return f"{ROW.format(name)}.cells[1].innerText.includes('{state}')"


async def ask(client: httpx.AsyncClient, url: str, request_id: str, model: str = MODEL) -> None:
    body = {"model": model, "prompt": "Say something nice.", "max_tokens": 5, "stream": True}
    answer = await client.post(f"{url}/v1/completions", json=body, headers={"x-request-id": request_id}, timeout=60)
    assert answer.status_code in {200, 404}


async def drained(client: httpx.AsyncClient, admin: str, name: str) -> bool:
    return bool((await client.get(f"{admin}/admin/endpoints/{name}")).json()["draining"])


def test_it_shows_the_fleet_and_keeps_up_with_it(servers: list[str], tmp_path: Path) -> None:
    """What changes is on the page within two seconds of the admin API's own word, by the page's clock."""

    async def main() -> None:
        with lbproxy(tmp_path, named(servers)) as (_, url, admin):
            async with page() as tab, httpx.AsyncClient() as client:
                await tab.visit(f"{admin}/")
                await tab.until(LIVE)
                assert await tab.js("location.pathname") == "/dashboard"
                for name in ("gpu-1", "gpu-2", "gpu-3"):
                    await tab.until(state_is(name, "up"))
                assert await tab.js("document.getElementById('up').textContent") == "3 of 3"
                await client.post(f"{admin}/admin/endpoints/gpu-2/drain", headers=changing(admin))
                took_ms = await tab.js(f"""new Promise((done) => {{
                    const began = performance.now();
                    const watch = setInterval(() => {{
                        if (!({state_is("gpu-2", "drained")})) return;
                        clearInterval(watch);
                        done(performance.now() - began);
                    }}, 10);
                }})""")
                print(f"on the page after {took_ms:.0f} ms")
                await tab.until("document.title.startsWith('2/3 up')")

                await ask(client, url, "seen-1")
                shown = "[...document.querySelectorAll('#decisions tbody tr')].map((row) => row.innerText).join()"
                await tab.until(f"{shown}.includes('seen-1') && {shown}.includes('completed')")
                used = "[...document.querySelectorAll('#tokens td.number')].map((one) => one.innerText).join()"
                row = (await client.get(f"{admin}/admin/usage")).json()["rows"][0]
                await tab.until(f"{used} === '{row['prompt_uncached']},0,{row['completion']}'")
                await tab.js("document.querySelector('button.id').click()")
                explained = "document.getElementById('explanation').innerText"
                await tab.until(f"{explained}.includes('Attempt 1: gpu-') && {explained}.includes('gpu-2 (draining)')")
                assert tab.complaints == []

    run(main(), timeout_s=240)


def test_roles_and_both_legs_of_a_split_request_are_shown(servers: list[str], tmp_path: Path) -> None:
    parts = [f"role: {role}, connector: shared-storage" for role in ("prefill", "decode")] + ["role: both"]
    entries = [f"{{url: '{url}', name: gpu-{n}, {parts[n - 1]}}}" for n, url in enumerate(servers, 1)]

    async def main() -> None:
        with lbproxy(tmp_path, entries, "routing: {split: always}") as (_, url, admin):
            async with page() as tab, httpx.AsyncClient() as client:
                await tab.visit(f"{admin}/dashboard")
                for name in ("gpu-1", "gpu-2", "gpu-3"):
                    await tab.until(state_is(name, "up"))
                roles = (
                    "[...document.querySelectorAll('#endpoints .role')].map((one) => one.hidden ? '' : one.textContent)"
                )
                assert await tab.js(roles) == ["prefill", "decode", ""]
                await ask(client, url, "split-1")
                shown = "[...document.querySelectorAll('#decisions tbody tr')].map((row) => row.innerText).join()"
                await tab.until(f"{shown}.includes('gpu-1 \u2192 gpu-2')")
                await tab.js("document.querySelector('button.id').click()")
                explained = "document.getElementById('explanation').innerText"
                await tab.until(f"{explained}.includes('Attempt 1: gpu-1 \u2192 gpu-2')")
                await tab.until(f"{explained}.includes('Attempt 1: decode on gpu-2')")
                assert await tab.js(f"{explained}.includes('on gpu-2 after prefill on gpu-1 in')")
                assert await tab.js(f"{explained}.includes('transfer')")
                assert tab.complaints == []

    run(main(), timeout_s=240)


def test_six_tiles_are_a_row_where_six_fit_and_no_figure_is_cut_off(servers: list[str], tmp_path: Path) -> None:
    tops = "[...document.querySelectorAll('.tile')].map((one) => Math.round(one.getBoundingClientRect().top))"
    cut = "[...document.querySelectorAll('.figure')].filter((one) => one.scrollWidth > one.clientWidth).length"
    note = "document.querySelector('#endpoints .note').textContent = 'no metrics for 12 min, used although ejected'"
    wide = "((one) => [one.clientWidth > 1000, one.scrollWidth > one.clientWidth])(document.querySelector('.scroll'))"
    fill = "[...document.querySelectorAll('.figure')].forEach((one) => { one.textContent = '1.23 / 45.6 s'; })"

    async def main() -> None:
        with lbproxy(tmp_path, named(servers)) as (_, _, admin):
            async with page() as tab:
                await tab.look(1200, 900)
                await tab.visit(f"{admin}/dashboard")
                await tab.until(f"{LIVE} && {state_is('gpu-3', 'up')}")
                for width, rows in ((1200, 1), (1300, 1), (1680, 1), (900, 2), (1100, 2)):
                    await tab.look(width, 900)
                    await tab.until(f"innerWidth === {width}")
                    assert len({*await tab.js(tops)}) == rows, width
                    assert await tab.js(f"{fill}, {cut}") == 0, width
                    assert await tab.js("document.documentElement.scrollWidth") <= width
                await tab.look(1440, 900)
                await tab.until("innerWidth === 1440")
                assert await tab.js(f"{note}, {wide}") == [True, False], "a state with a long note fits into the table"
                assert tab.complaints == []

    run(main(), timeout_s=240)


NOBODY = "{url: 'http://127.0.0.1:9', name: gone}"
SCREENS = [(1440, 900, "light"), (1440, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
PALE = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    const rgb = (...colors) => {
        canvas.clearRect(0, 0, 1, 1);
        for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const linear = (one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    const light = (color) => color.map((one) => linear(one / 255))
        .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
    const pale = [];
    for (const element of document.querySelectorAll('main *, header *')) {
        const text = [...element.childNodes].filter((one) => one.nodeType === 3).map((one) => one.data.trim()).join('');
        if (!text || !element.checkVisibility() || element.closest('.unseen')) continue;
        const under = [];
        for (let at = element; at; at = at.parentElement) under.unshift(getComputedStyle(at).backgroundColor);
        const [back, front] = [light(rgb(...under)), light(rgb(...under, getComputedStyle(element).color))];
        const ratio = (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
        if (ratio < 4.5) pale.push(`${text}: ${ratio.toFixed(1)}`);
    }
    return pale;
})()"""
"""Texts whose contrast is below WCAG's 4.5 (AA)."""


@pytest.mark.parametrize(("width", "height", "scheme"), SCREENS)
def test_what_needs_attention_is_seen_first_on_each_screen(
    width: int, height: int, scheme: Literal["light", "dark"], servers: list[str], tmp_path: Path
) -> None:
    """What is down, why, and the button that acts on it: in the first screen, without scrolling in any direction."""
    rows = "[...document.querySelectorAll('#endpoints tbody tr')]"
    inside = "((one) => one.top >= 0 && one.left >= 0 && one.bottom <= innerHeight && one.right <= innerWidth)"

    async def main() -> None:
        with lbproxy(tmp_path, [*named(servers), NOBODY]) as (_, url, admin):
            async with page() as tab, httpx.AsyncClient() as client:
                await ask(client, url, "seen-1")
                await tab.look(width, height, scheme)
                await tab.visit(f"{admin}/dashboard")
                await tab.until(f"{LIVE} && {state_is('gone', 'down')} && {state_is('gpu-3', 'up')}")
                await client.post(f"{admin}/admin/endpoints/gpu-3/drain", headers=changing(admin))
                await tab.until(state_is("gpu-3", "drained"))
                order = await tab.js(f"{rows}.map((row) => row.querySelector('.name').textContent)")
                assert order == ["gone", "gpu-3", "gpu-1", "gpu-2"]
                assert "Connection refused" in await tab.js(f"{rows}[0].innerText")
                for what in (".name", ".note", "button"):
                    assert await tab.js(f"{inside}({rows}[0].querySelector('{what}').getBoundingClientRect())"), what
                assert await tab.js("document.documentElement.scrollWidth") <= width
                assert await tab.js(
                    "[...document.querySelectorAll('main .scroll')].every((one) => one.scrollWidth <= one.clientWidth)"
                )
                assert await tab.js(PALE) == []
                assert tab.complaints == []

    run(main(), timeout_s=240)


def test_a_phone_is_used_by_keyboard_alone_and_read_aloud(servers: list[str], tmp_path: Path) -> None:
    """Rows that look like cards are still those of a table, and the focus is always on something that is seen."""
    focus = "document.activeElement"
    label = f"({focus}.getAttribute('aria-label') ?? {focus}.textContent)"

    async def main() -> None:
        with lbproxy(tmp_path, named(servers)) as (_, url, admin):
            async with page() as tab, httpx.AsyncClient() as client:
                await ask(client, url, "seen-1")
                await tab.look(390, 844)
                await tab.visit(link(admin))
                await tab.until(f"{LIVE} && {state_is('gpu-3', 'up')} && document.querySelector('button.id') !== null")
                nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
                found = [(one["role"]["value"], one.get("name", {}).get("value", "")) for one in nodes]
                assert ("button", "Drain gpu-1") in found
                assert any(role == "table" and name.startswith("Endpoints") for role, name in found)
                assert any(role == "rowheader" and name.startswith("gpu-1") for role, name in found)

                async def tab_to(wanted: str) -> None:
                    for _ in range(30):
                        await tab.press("Tab", 9)
                        assert await tab.js(f"{focus}.checkVisibility() && {focus}.getBoundingClientRect().width > 1")
                        if await tab.js(label) == wanted:
                            return
                    raise AssertionError(f"the focus never comes to {wanted}")

                await tab_to("Drain gpu-1")
                await tab.press("Enter", 13, "\r")
                await tab.until(state_is("gpu-1", "drained"))
                await tab_to("seen-1")
                await tab.press("Enter", 13, "\r")
                await tab.until("document.getElementById('explanation').innerText.includes('Attempt 1: gpu-')")
                assert await tab.js("document.getElementById('explain').scrollWidth") <= 390
                await tab.press("Escape", 27)
                await tab.until("!document.getElementById('explain').open")
                assert await tab.js(label) == "seen-1"
                assert tab.complaints == []

    run(main(), timeout_s=240)


TILE = "[...document.querySelectorAll('.tile')].find((one) => one.innerText.startsWith('{}'))"


def test_streamed_tokens_count_as_they_come_and_hits_where_they_are_reported(
    servers: list[str], tmp_path: Path
) -> None:
    """Most clients' streams have no usage: that is no token and no hit of 0."""
    tokens, hits = (
        f"{TILE.format(head)}.querySelector('.figure').textContent" for head in ("Response tok", "Prompt tok")
    )

    async def main() -> None:
        with lbproxy(tmp_path, named(servers[:1])) as (_, url, admin):
            async with page() as tab, httpx.AsyncClient(timeout=60) as client:
                await tab.visit(f"{admin}/dashboard")
                await tab.until(f"{LIVE} && {state_is('gpu-1', 'up')}")
                prompt = "Say something nice. " * 40
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 100, "ignore_eos": True, "stream": True}
                await client.post(f"{url}/v1/completions", json=body)
                await tab.until(f"parseFloat({tokens}) > 0")
                assert await tab.js(hits) == DASH
                for _ in range(2):
                    await client.post(f"{url}/v1/completions", json=body | {"stream": False})
                await tab.until(f"parseFloat({hits}) > 40")
                assert tab.complaints == []

    run(main(), timeout_s=240)


def test_who_is_held_and_why_is_shown(servers: list[str], tmp_path: Path) -> None:
    one = "admission: {max_in_flight_per_endpoint: 1}"

    async def main() -> None:
        with lbproxy(tmp_path, named(servers[:1]), one) as (_, url, admin):
            async with page() as tab, httpx.AsyncClient(timeout=120) as client:
                await tab.visit(f"{admin}/dashboard")
                await tab.until(f"{LIVE} && {state_is('gpu-1', 'up')}")
                body = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
                running = [asyncio.ensure_future(client.post(f"{url}/v1/completions", json=body)) for _ in range(40)]
                held = TILE.format("In flight, and held")
                await tab.until(f"/1 \\/ [1-9]/.test({held}.innerText) && {held}.querySelector('small').textContent")
                why = await tab.js(f"{held}.querySelector('small').textContent")
                groups = await tab.js("document.getElementById('groups').innerText")
                assert why in {"best endpoint full", "all endpoints at their limit"}
                assert why in groups
                for request in running:
                    request.cancel()
                assert tab.complaints == []

    run(main(), timeout_s=240)


def test_what_nobody_learned_yet_is_a_dash(servers: list[str], tmp_path: Path) -> None:
    async def main() -> None:
        with lbproxy(tmp_path, named(servers)) as (_, url, admin):
            async with page() as tab, httpx.AsyncClient() as client:
                await tab.visit(f"{admin}/dashboard")
                await tab.until(f"{LIVE} && {state_is('gpu-1', 'up')}")
                learned = "[...document.querySelectorAll('#learned dd')].map((one) => one.textContent)"
                assert await tab.js(learned) == [DASH] * 6
                gap = f"[...{ROW.format('gpu-1')}.cells].slice(-3, -1).map((one) => one.textContent)"
                assert await tab.js(gap) == [DASH, DASH]
                await ask(client, url, "teaches")
                await tab.until(f"{learned}[3] !== '{DASH}'")  # tokens of an answer
                assert (await tab.js(learned))[5] == DASH, "no adapter was loaded"
                assert tab.complaints == []

    run(main(), timeout_s=240)


def test_it_says_when_it_is_stale_and_comes_back_by_itself(servers: list[str], tmp_path: Path) -> None:
    async def main() -> None:
        with lbproxy(tmp_path, named(servers)) as (process, _, admin):
            config = tmp_path / "cfg.yaml"
            fixed = config.read_text().replace("admin: 127.0.0.1:0", f"admin: {admin.removeprefix('http://')}")
            async with page() as tab:
                await tab.visit(f"{admin}/dashboard")
                await tab.until(f"{LIVE} && {state_is('gpu-1', 'up')}")
                process.stop()
                await tab.until(STALE)
                assert await tab.js("document.querySelectorAll('#endpoints tbody tr').length") == 3, "the last picture"
                assert await tab.js("document.title.startsWith('stale')")
                config.write_text(fixed)
                with Process("--config", str(config)) as again:
                    again.wait_for("listens on")
                    await tab.until(f"{LIVE} && {state_is('gpu-1', 'up')}")
                    assert not await tab.js("document.body.classList.contains('stale')")

    run(main(), timeout_s=240)


def test_endpoints_are_drained_by_keyboard_and_not_the_last_by_mistake(servers: list[str], tmp_path: Path) -> None:
    async def main() -> None:
        with lbproxy(tmp_path, named(servers[:2])) as (_, _, admin):
            async with page() as tab, httpx.AsyncClient() as client:
                await tab.visit(link(admin))
                await tab.until(f"{LIVE} && {state_is('gpu-1', 'up')} && {state_is('gpu-2', 'up')}")
                assert await tab.js("location.href") == f"{admin}/dashboard", "no token for who looks over a shoulder"
                await tab.js("document.querySelector('#endpoints tbody button').focus()")
                label = "document.activeElement.getAttribute('aria-label')"
                assert await tab.js(label) == "Drain gpu-1"
                await tab.press("Enter", 13, "\r")
                await tab.until(state_is("gpu-1", "drained"))
                assert await drained(client, admin, "gpu-1")
                await tab.until(f"{label} === 'Undrain gpu-1'")  # the focus stayed where it was
                assert "gpu-1 gets no new requests" in await tab.js("document.getElementById('message').textContent")

                await tab.press("Tab", 9)
                assert await tab.js(label) == "Drain gpu-2"
                await tab.press("Enter", 13, "\r")
                await tab.until("document.getElementById('confirm').open")
                assert await tab.js("document.activeElement.innerText") == "Cancel"
                await tab.press("Escape", 27)
                await tab.until("!document.getElementById('confirm').open")
                assert not await drained(client, admin, "gpu-2"), "nothing was confirmed"

                await tab.js(f"{ROW.format('gpu-1')}.querySelector('button').click()")
                await tab.until(state_is("gpu-1", "up"))
                assert not await drained(client, admin, "gpu-1")
                assert tab.complaints == []

    run(main(), timeout_s=240)


def test_the_made_token_is_asked_for_by_the_buttons_alone(servers: list[str], tmp_path: Path) -> None:
    """Looking needs none; a link brings one to a page that is open already."""

    async def main() -> None:
        with lbproxy(tmp_path, named(servers[:2])) as (_, _, admin):
            async with page() as tab, httpx.AsyncClient() as client:
                await tab.visit(f"{admin}/dashboard#token=short")
                await tab.until(f"{LIVE} && {state_is('gpu-1', 'up')}")
                await tab.js(f"{ROW.format('gpu-1')}.querySelector('button').click()")
                await tab.until("document.getElementById('token').open")
                why = await tab.js("document.getElementById('token-why').textContent")
                assert "`lbproxy admin-token` prints" in why
                await tab.press("Escape", 27)
                message = "document.getElementById('message').textContent"
                await tab.until(f"{message}.includes('`lbproxy admin-token` prints it')")
                assert not await drained(client, admin, "gpu-1")
                await tab.js(f"location.hash = {link(admin).partition('#')[2]!r}")
                await tab.until("location.hash === ''")
                await tab.js(f"{ROW.format('gpu-1')}.querySelector('button').click()")
                await tab.until(state_is("gpu-1", "drained"))
                assert await tab.js("document.cookie.length + localStorage.length") == 0

    run(main(), timeout_s=240)


def test_with_a_token_the_page_asks_for_it_and_keeps_it_in_the_tab(servers: list[str], tmp_path: Path) -> None:
    async def main() -> None:
        with lbproxy(tmp_path, named(servers[:1])) as (process, _, _):
            process.stop()
        config = tmp_path / "cfg.yaml"
        guarded = f"admin: {{host: 127.0.0.1, port: 0, token: '{TOKEN}'}}"
        config.write_text(config.read_text().replace("admin: 127.0.0.1:0", guarded))
        with Process("--config", str(config)) as process:
            admin = process.wait_for(r"admin on (http://[\w.:]+)")[1]
            async with page() as tab:
                await tab.visit(f"{admin}/dashboard")
                await tab.until("document.getElementById('token').open")
                assert not await tab.js("document.querySelectorAll('#endpoints tbody tr').length")
                for text in ("wrong-wrong-wrong", TOKEN):
                    await tab.js("document.getElementById('token-text').focus()")
                    await tab.type(text)
                    await tab.js("document.querySelector('#token .primary').click()")
                    if text != TOKEN:
                        await tab.until(
                            "document.getElementById('token').open"
                            " && document.getElementById('token-why').textContent.includes('token is wrong')"
                        )
                await tab.until(f"{LIVE} && {state_is('gpu-1', 'up')}")
                await tab.js(f"{ROW.format('gpu-1')}.querySelector('button').click()")
                await tab.until("document.getElementById('confirm').open")
                await tab.js("document.getElementById('confirm-yes').click()")
                await tab.until(state_is("gpu-1", "drained"))
                assert await tab.js("localStorage.length + document.cookie.length") == 0
                await tab.reload()
                await tab.until(LIVE)
                assert TOKEN not in await tab.js("document.documentElement.outerHTML")
                await tab.reload("document.getElementById('forget').click()")
                await tab.until("document.getElementById('token').open")
                assert await tab.js("sessionStorage.length") == 0

    run(main(), timeout_s=240)


HOSTILE = [
    "<img src=x onerror=document.title='owned'>",
    "</script><script>document.title='owned'</script>",
    "\u202e\u0000\u200bnosj\x1b[2J",
    "x" * 5000,
    "__proto__",
    "constructor",
]


def hostile_frame(state: dict[str, Any]) -> dict[str, Any]:
    """A frame in which every text is such a name: more than lbproxy itself would let through."""
    made = iter(range(10**9))

    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            if key.startswith("by_"):
                return dict.fromkeys(HOSTILE, 3)
            return {name: spoil(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [spoil(one, key) for one in value]
        return HOSTILE[next(made) % len(HOSTILE)] if isinstance(value, str) and key != "at" else value

    state["queue"]["waiting"] = 3
    state["endpoints"] *= 2
    return dict(spoil(state))


@asynccontextmanager
async def spoilt(frame: dict[str, Any]) -> AsyncIterator[str]:
    """An admin listener that shows this frame for ever."""

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(b"event: state\ndata: %b\n\n" % json.dumps(frame).encode())
                await asyncio.sleep(0.5)
        return response

    app = web.Application()
    Dashboard().add_to(app.router)
    app.router.add_get("/admin/events", events)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_hostile_names_are_shown_as_text(servers: list[str], tmp_path: Path) -> None:
    """Clients choose ids and models, servers models and reasons; none of them may write on the operator's page."""

    async def main() -> None:
        with lbproxy(tmp_path, named(servers)) as (_, url, admin):
            async with page() as tab, httpx.AsyncClient(base_url=admin) as client:
                await ask(client, url, "hostile", "<img src=x onerror=alert(1)>&amp;")
                await tab.visit(f"{admin}/dashboard")
                shown = "document.querySelector('#decisions tbody').innerText"
                await tab.until(f"{LIVE} && {shown}.includes('<img src=x onerror=alert(1)>&amp;')")

                state = (await client.get("/admin/state")).json()
                history = (await client.get("/admin/history")).json()["points"]
                decisions = (await client.get("/admin/decisions")).json()["decisions"]
                frame = hostile_frame(state | {"history": history, "decisions": decisions})
                async with spoilt(frame) as elsewhere:
                    await tab.visit(f"{elsewhere}/dashboard")
                    await tab.until(
                        f"{LIVE} && document.querySelector('main').textContent.includes('onerror=document.title')"
                    )
                    assert await tab.js("document.querySelectorAll('#endpoints tbody tr').length") == 6
                    assert "owned" not in await tab.js("document.title")
                    assert await tab.js("document.querySelectorAll('main img, main script, main b').length") == 0
                    text = await tab.js("document.documentElement.innerText")
                    assert not set(text) & {"\u202e", "\u200b", "\x00", "\x1b"}
                    assert len(text) < 100_000, "and none fills the page"
                    assert await tab.js("document.documentElement.scrollWidth") <= await tab.js("innerWidth")
                assert [one for one in tab.complaints if "ERR_" not in one] == []

    run(main(), timeout_s=240)


def test_nothing_can_become_html_and_nothing_leads_elsewhere(servers: list[str], tmp_path: Path) -> None:
    """The policy is the browser's, not only our care: it refuses what a defect of the page might try."""

    async def main() -> None:
        with lbproxy(tmp_path, named(servers[:1])) as (_, _, admin):
            async with page() as tab:
                await tab.visit(f"{admin}/dashboard")
                await tab.until(LIVE)
                tried = "document.body.innerHTML = '<b>x</b>'; return 'done'"
                assert await tab.js(f"(() => {{ try {{ {tried} }} catch (e) {{ return e.name }} }})()") == "TypeError"
                sent = "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')"
                assert await tab.js(sent) == "refused"
                assert any("Content Security Policy" in one for one in tab.complaints)

    run(main(), timeout_s=240)


def test_screen_readers_find_tables_names_and_states(servers: list[str], tmp_path: Path) -> None:
    """As the browser hands the page to them."""

    async def main() -> None:
        with lbproxy(tmp_path, named(servers)) as (_, _, admin):
            async with page() as tab:
                await tab.visit(f"{admin}/dashboard")
                await tab.until(f"{LIVE} && {state_is('gpu-3', 'up')}")
                nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
                found = {
                    (one["role"]["value"], one.get("name", {}).get("value", "")) for one in nodes if not one["ignored"]
                }
                assert ("button", "Drain gpu-1") in found
                assert any(role == "rowheader" and name.startswith("gpu-1") for role, name in found)
                assert any(role == "table" and name.startswith("Endpoints") for role, name in found)
                assert ("columnheader", "in flight") in found
                assert any(
                    role in {"image", "img"} and name.startswith("First byte of streams, last") for role, name in found
                )
                live = await tab.js("document.querySelectorAll('[aria-live], [role=status], [role=alert]').length")
                assert live == 2, "the connection and what was done; no number that changes each second"

    run(main(), timeout_s=240)


def test_a_tab_that_nobody_sees_asks_for_nothing(servers: list[str], tmp_path: Path) -> None:
    async def main() -> None:
        with lbproxy(tmp_path, named(servers[:1])) as (_, _, admin):
            async with page() as tab:
                await tab.visit(f"{admin}/dashboard")
                await tab.until(LIVE)
                await tab.js("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
                connections = "document.getElementById('connection-text').textContent"
                await tab.until(f"{connections} !== 'Live'", within_s=60)
                await tab.js("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
                await tab.until(LIVE)

    run(main(), timeout_s=240)
