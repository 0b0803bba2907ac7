# SPDX-License-Identifier: Apache-2.0
"""What the settings say of an endpoint holds on the wire, in lbproxy as a user would run it."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import httpx

from tests.control.rig import model_list, page
from tests.support.aio import run, until
from tests.support.certificates import CA, server_context
from tests.support.connect_proxy import ConnectProxy
from tests.support.endpoint import OK, Script, ScriptedEndpoint, answer
from tests.support.process import Process, lbproxy_beside

KEY = "sk-upstream-secret"
METRICS = Path(__file__).parents[1] / "fixtures/metrics/vllm-0.32.0-busy-2-running-rejecting.prom"


def server_of(model: str) -> dict[str, Script]:
    body = json.dumps({"served": model}).encode()
    return {
        "/health": OK,
        "/v1/models": model_list(model),
        "/v1/chat/completions": answer(body),
        "/metrics": page(METRICS.read_bytes()),
    }


async def ask(client: httpx.AsyncClient, url: str, model: str) -> httpx.Response:
    return await client.post(
        f"{url}/v1/chat/completions", json={"model": model}, headers={"Authorization": "Bearer clients-own"}
    )


async def until_up(client: httpx.AsyncClient, admin: str, *names: str) -> None:
    async with asyncio.timeout(30):
        for name in names:
            line = f'lbproxy_endpoint_up{{endpoint="{name}"}} 1.0\n'
            while line not in (await client.get(f"{admin}/metrics")).text:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.02)


def test_two_models_one_with_a_key_over_tls(tmp_path: Path) -> None:
    """Each request goes to the endpoint that has its model, with the credentials that belong there."""
    names: list[str | None] = []

    async def main() -> None:
        async with (
            ScriptedEndpoint(server_of("asked"), tls=server_context(names)) as secure,
            ScriptedEndpoint(server_of("told")) as plain,
        ):
            (tmp_path / "ca.pem").write_text(CA.read_text())
            more = f"name: secure, api_key: '${{UPSTREAM:-{KEY}}}', tls: {{ca: ca.pem, server_name: vllm.test}}"
            endpoints = [
                f"{{url: '{secure.url}', {more}}}",
                f"{{url: '{plain.url}', name: plain, models: [said, said-too]}}",
            ]
            async with lbproxy_beside(tmp_path, endpoints) as (process, url, admin):
                async with httpx.AsyncClient(timeout=30) as client:
                    await until_up(client, admin, "secure", "plain")
                    await until(lambda: secure.asked("/metrics"))
                    listed = (await client.get(f"{url}/v1/models")).json()["data"]
                    assert [one["id"] for one in listed] == ["asked", "said", "said-too"]
                    one, two = await ask(client, url, "asked"), await ask(client, url, "said")
                    assert (one.json(), one.headers["x-lbproxy-endpoint"]) == ({"served": "asked"}, "secure")
                    assert (two.json(), two.headers["x-lbproxy-endpoint"]) == ({"served": "told"}, "plain")
                    unknown = await ask(client, url, "told")
                    assert unknown.status_code == 404
                    assert unknown.json()["error"]["code"] == "model_not_found"
                    for told in (str(secure.port), "said", "secure", KEY):
                        assert told not in unknown.text
                    assert KEY not in (await client.get(f"{admin}/metrics")).text
                assert process.stop() == 0
            assert KEY not in process.output
            assert "Traceback" not in process.output
            assert {one.field("authorization") for one in secure.requests} == {f"Bearer {KEY}"}
            assert {one.path for one in secure.requests} >= {
                "/health",
                "/v1/models",
                "/metrics",
                "/v1/chat/completions",
            }
            assert {one.field("host") for one in secure.requests} == {f"vllm.test:{secure.port}"}
            assert set(names) == {"vllm.test"}
            assert [one.field("authorization") for one in plain.requests if one.path == "/v1/chat/completions"] == [
                "Bearer clients-own"
            ]
            assert plain.asked("/v1/models") == 0

    run(main())


def test_check_says_what_is_wrong_with_a_certificate_and_never_the_key(tmp_path: Path) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(server_of("m"), tls=server_context()) as server:
            config = tmp_path / "cfg.yaml"
            text = f"endpoints:\n  - {{url: '{server.url}', api_key: {KEY}, tls: {{%s}}}}\n"
            for tls, code, said in (
                ("", 1, "the certificate is refused: "),
                (f"ca: '{CA}'", 0, "GET /health returned 200"),
                ("verify: false", 0, "GET /health returned 200"),
                ("ca: nowhere.pem", 2, "endpoints[0].tls.ca: expected a file of certificates, but it cannot be read"),
            ):
                config.write_text(text % tls)
                with Process("check", "--config", str(config)) as process:
                    assert await asyncio.to_thread(process.process.wait, 90) == code
                    assert said in " ".join(process.read().split())
                    assert KEY not in process.output
                    assert "Traceback" not in process.output

    run(main())


def test_certificates_at_start_and_at_reload(tmp_path: Path) -> None:
    """A file that is not there: no start, and a reload that changes nothing. Without verification: a warning."""

    async def main() -> None:
        async with ScriptedEndpoint(server_of("m"), tls=server_context()) as server:
            config = tmp_path / "cfg.yaml"
            entry = f"{{url: '{server.url}', name: gpu, tls: {{ca: ca.pem}}}}"
            config.write_text(f"endpoints: [{entry}]\n")
            with Process("--config", str(config)) as process:
                assert await asyncio.to_thread(process.process.wait, 90) == 2
                assert "endpoints[0].tls.ca: expected a file of certificates, but it cannot be read" in process.read()
            (tmp_path / "ca.pem").write_text(CA.read_text())
            async with (
                lbproxy_beside(tmp_path, [entry]) as (process, url, admin),
                httpx.AsyncClient(timeout=30) as client,
            ):
                await until_up(client, admin, "gpu")
                assert "verify: false" not in process.read()
                (tmp_path / "ca.pem").unlink()
                process.process.send_signal(1)
                await until(lambda: "the settings are refused, and the old ones stay in force" in process.read())
                assert "endpoints[0].tls.ca" in process.output
                assert (await ask(client, url, "m")).status_code == 200
                config.write_text(config.read_text().replace("ca: ca.pem", "verify: false"))
                process.process.send_signal(1)
                await until(lambda: "of gpu are not verified" in process.read())
                assert (await ask(client, url, "m")).status_code == 200

    run(main())


def test_everything_goes_through_the_proxy_and_its_password_shows_nowhere(tmp_path: Path) -> None:
    password = "pr0xy-passw0rd"
    digest = base64.b64encode(f"me:{password}".encode()).decode()

    async def main() -> None:
        async with (
            ScriptedEndpoint(server_of("m"), tls=server_context()) as server,
            ConnectProxy(user=f"me:{password}") as proxy,
        ):
            (tmp_path / "ca.pem").write_text(CA.read_text())
            entry = (
                f"{{url: '{server.url}', name: far, proxy: 'http://me:%s@127.0.0.1:{proxy.port}', tls: {{ca: ca.pem}}}}"
            )
            async with lbproxy_beside(tmp_path, [entry % password]) as (process, url, admin):
                async with httpx.AsyncClient(timeout=30) as client:
                    await until_up(client, admin, "far")
                    await until(lambda: server.asked("/metrics"))
                    assert (await ask(client, url, "m")).json() == {"served": "m"}
                    assert len(proxy.asked) == len(server.wires)
                    pages = [
                        (await client.get(f"{admin}/{one}")).text for one in ("metrics", "admin/config", "admin/state")
                    ]
                    assert f"http://***@127.0.0.1:{proxy.port}" in pages[1]
                checked = await asyncio.to_thread(check, tmp_path / "cfg.yaml")
                assert f"http://***@127.0.0.1:{proxy.port}" in checked
                # Other credentials, which the proxy refuses.
                config = tmp_path / "cfg.yaml"
                config.write_text(config.read_text().replace(password, f"{password}2"))
                process.process.send_signal(1)
                wrong = f"proxy 127.0.0.1:{proxy.port}: returned 407 Proxy Authentication Required to CONNECT"
                await until(lambda: wrong in process.read(), "the health check says why")
                async with httpx.AsyncClient(timeout=30) as client:
                    await until(lambda: '"down"' in process.read(), "it is down")
                    refused = await ask(client, url, "m")
                    assert refused.status_code in {502, 503}
                    pages.append(refused.text)
                    pages.append((await client.get(f"{admin}/admin/state")).text)
                checked += await asyncio.to_thread(check, config)
                assert wrong in checked
                assert await asyncio.to_thread(process.stop) == 0
            for text in (*pages, checked, process.output):
                assert password not in text
                assert digest[:-3] not in text

    run(main())


def check(config: Path) -> str:
    with Process("check", "--config", str(config)) as process:
        process.process.wait(30)
        return " ".join(process.read().split())
