# SPDX-License-Identifier: Apache-2.0
"""Keys and certificates as users have them: in files that change while lbproxy runs."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

from tests.e2e.test_product import gauge
from tests.support.aio import run, until
from tests.support.load import load
from tests.support.process import Process, mock
from tests.support.tls import Authority
from tests.support.workers import one_process

INLINE, FILED, HASHED, ROTATED = (f"sk-{name}-{secrets.token_hex(16)}" for name in ("in", "file", "hash", "new"))
TOKEN = f"admin-{secrets.token_hex(16)}"
ENVIRON = {"INLINE_KEY": INLINE, "ADMIN_TOKEN": TOKEN}
BODY = {"model": "sim", "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """One simulated server."""
    with mock("--speed", "20") as (_, url):
        yield url


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def write_settings(
    folder: Path, server: str, more: str = "", listen: str = "127.0.0.1:0", lame_duck: str = "0s"
) -> Path:
    path = folder / "cfg.yaml"
    path.write_text(
        f"listen: {listen}\nadmin: {{host: 127.0.0.1, port: 0, token: '${{ADMIN_TOKEN}}'}}\n"
        f"drain: {{lame_duck: {lame_duck}}}\n{more}\nendpoints: [{server}]\n"
    )
    return path


@contextmanager
def running(config: Path) -> Iterator[tuple[Process, str, str]]:
    with Process("--config", str(config), env=ENVIRON) as process:
        match = process.wait_for(r"listens on (https?://[\w.:]+), admin on (http://[\w.:]+)")
        yield process, match[1], match[2]


def status(url: str, key: str) -> int:
    """What a request with this key gets. On a machine that is too busy for probes, 503 is not about the key."""
    code = 503
    for _ in range(100):
        code = httpx.post(f"{url}/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}).status_code
        if code != 503:
            break
    return code


async def eventually(condition: Callable[[], object], what: str) -> None:
    """With time for a process to start beside others."""
    await until(condition, what, within_s=60.0)


def reloads(process: Process, level: str) -> list[str]:
    return [str(line["message"]) for line in process.lines("reload") if line["level"] == level]


def keyed(folder: Path) -> str:
    """Settings with a key of each kind."""
    (folder / "keys").write_text(
        f"# who may\nteam-b: {FILED}\n\nteam-c: sha256:{sha256(HASHED.encode()).hexdigest()}\n"
    )
    return f"auth: {{keys: [{{name: team-a, key: '${{INLINE_KEY}}'}}], file: {folder / 'keys'}}}"


def test_each_kind_of_key_opens_and_its_name_is_in_the_log(server: str, tmp_path: Path) -> None:
    config = write_settings(tmp_path, server, keyed(tmp_path))
    with running(config) as (process, url, admin):
        assert "requires one of 3 API keys" in process.read()
        run(eventually(lambda: httpx.get(f"{admin}/readyz").status_code == 200, "it is ready"))
        for key in (INLINE, FILED, HASHED):
            assert status(url, key) == 200
        assert status(url, ROTATED) == 401
        client = OpenAI(base_url=f"{url}/v1", api_key=INLINE, max_retries=0)
        assert [one.id for one in client.models.list()] == ["sim"]
        with pytest.raises(openai.AuthenticationError) as error:
            client.with_options(api_key="wrong").models.list()
        assert error.value.code == "invalid_api_key"
        run(eventually(lambda: len(process.lines("request")) == 6, "all are logged"))
        names = Counter(line.get("key") for line in process.lines("request"))  # workers log in no particular order
        assert names == {"team-a": 2, "team-b": 1, "team-c": 1, None: 2}
        page = httpx.get(f"{admin}/metrics").text
        assert 'lbproxy_requests_total{code="401",outcome="invalid_api_key",route="other"} 2.0' in page


@one_process("each worker reads files by itself, within their interval")
def test_a_file_of_keys_that_changes_is_taken_over_and_a_bad_one_is_not(server: str, tmp_path: Path) -> None:
    """In place, by another file in its place, by a link that leads elsewhere; broken, emptied, gone, and back."""
    config = write_settings(tmp_path, server, keyed(tmp_path))
    keys, new = tmp_path / "keys", tmp_path / "new"

    def replace(text: str) -> None:
        new.write_text(text)
        new.rename(keys)

    def link(text: str) -> None:
        """As Kubernetes does it: what is linked to never changes."""
        target = tmp_path / f"keys-{secrets.token_hex(4)}"
        target.write_text(text)
        new.symlink_to(target)
        new.rename(keys)

    with running(config) as (process, url, admin):
        run(eventually(lambda: httpx.get(f"{admin}/readyz").status_code == 200, "it is ready"))
        good, bad = 0, 0
        for write in (keys.write_text, replace, link, link):
            write(f"team-b: {ROTATED}\nteam-b: {FILED}\n")
            good += 1
            run(eventually(lambda: len(reloads(process, "info")) == good, "it is read"))  # noqa: B023
            assert [status(url, key) for key in (ROTATED, FILED, INLINE)] == [200, 200, 200]
            write(f"team-b: {ROTATED}\n")
            good += 1
            run(eventually(lambda: len(reloads(process, "info")) == good, "it is read"))  # noqa: B023
            assert [status(url, key) for key in (ROTATED, FILED, INLINE)] == [200, 401, 200]
            for broken in (f"team-b: {FILED}\nteam-b {FILED}\n", "", f"{ROTATED}\n{ROTATED}\n"):
                write(broken)
                bad += 1
                run(eventually(lambda: len(reloads(process, "error")) == bad, "it is refused"))  # noqa: B023
                assert [status(url, key) for key in (ROTATED, FILED, INLINE)] == [200, 401, 200]
                assert gauge(admin, "lbproxy_config_reload_success") == {"": 0.0}
        keys.unlink()
        run(eventually(lambda: len(reloads(process, "error")) == bad + 1, "it is missed"))
        assert reloads(process, "error")[-1].endswith("no such file or directory")
        assert [status(url, key) for key in (ROTATED, FILED, INLINE)] == [200, 401, 200]
        process.process.send_signal(signal.SIGHUP)
        run(eventually(lambda: len(reloads(process, "error")) == bad + 2, "a reload is refused"))
        assert "the settings are refused, and the old ones stay in force" in reloads(process, "error")[-1]
        assert status(url, ROTATED) == 200
        keys.write_text(f"team-b: {FILED}\n")
        run(eventually(lambda: len(reloads(process, "info")) == good + 1, "it is back"))
        assert [status(url, key) for key in (ROTATED, FILED, INLINE)] == [401, 200, 200]
        assert gauge(admin, "lbproxy_config_reload_success") == {"": 0.0}, "the reload is still owed"
        process.process.send_signal(signal.SIGHUP)
        run(eventually(lambda: gauge(admin, "lbproxy_config_reload_success") == {"": 1.0}, "it is made up for"))
        assert "Traceback" not in process.read()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_flow_that_no_key_has_is_said_at_the_start_and_at_a_reload(server: str, tmp_path: Path, workers: int) -> None:
    """Whoever misspells the name of a key believes that a limit holds."""
    more = f"workers: {workers}\nauth: {{keys: [{{name: bob, key: '${{INLINE_KEY}}'}}]}}\n"
    config = write_settings(tmp_path, server, f"{more}flows: {{named: {{bob: {{weight: 2}}, bobb: {{in_flight: 1}}}}}}")
    with running(config) as (process, _, _):
        process.wait_for(r"flows\.named\.bobb: no API key has this name")
        write_settings(tmp_path, server, f"{more}flows: {{named: {{bop: {{in_flight: 1}}}}}}")
        process.process.send_signal(signal.SIGHUP)
        process.wait_for(r"flows\.named\.bop: no API key has this name")
        assert "flows.named.bob:" not in process.read()


def test_keys_come_and_go_by_a_reload(server: str, tmp_path: Path) -> None:
    config = write_settings(tmp_path, server)
    with running(config) as (process, url, admin):
        assert "no API keys: open to every client" in process.read()
        run(eventually(lambda: status(url, "x") == 200, "it is ready"))
        for more, allowed in (("auth: {keys: ['${INLINE_KEY}']}", False), ("", True)):
            write_settings(tmp_path, server, more)
            process.process.send_signal(signal.SIGHUP)
            run(eventually(lambda: (status(url, "x") == 200) == allowed, "it holds"))  # noqa: B023
            assert status(url, INLINE) == 200
        assert httpx.get(f"{admin}/admin", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 404
        assert httpx.get(f"{admin}/admin").status_code == 401
        text = config.read_text().replace("token: '${ADMIN_TOKEN}'", f"token: {ROTATED}")
        config.write_text(text)
        process.process.send_signal(signal.SIGHUP)
        headers = {"Authorization": f"Bearer {ROTATED}"}
        run(eventually(lambda: httpx.get(f"{admin}/admin", headers=headers).status_code == 404, "another token"))
        assert httpx.get(f"{admin}/admin", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 401


def test_who_listens_beyond_this_machine_without_keys_is_warned(server: str, tmp_path: Path) -> None:
    with running(write_settings(tmp_path, server, listen="0.0.0.0:0")) as (process, _, _):
        process.wait_for("can be reached from other machines, and no API key is required")
    with running(write_settings(tmp_path, server, keyed(tmp_path), listen="0.0.0.0:0")) as (process, _, _):
        assert "can be reached from" not in process.read()
    with running(write_settings(tmp_path, server)) as (process, _, _):
        assert "can be reached from" not in process.read()


@pytest.mark.parametrize("command", [(), ("check",)])
def test_what_cannot_be_read_ends_a_start_and_a_check(command: tuple[str, ...], server: str, tmp_path: Path) -> None:
    """All of it at once, and nothing that is in the files."""
    (tmp_path / "keys").write_text(f"team-b: {FILED} {FILED}\nx{FILED}:{FILED}\nshort\n")
    (tmp_path / "cert.pem").write_text("no certificate")
    tls = f"tls: {{cert: {tmp_path / 'cert.pem'}, key: {tmp_path / 'absent.pem'}}}"
    more = f"auth: {{file: {tmp_path / 'keys'}}}"
    config = write_settings(tmp_path, server, more, listen=f"{{host: 127.0.0.1, port: 0, {tls}}}")
    with Process(*command, "--config", str(config), env=ENVIRON) as process:
        assert process.process.wait(30) == 2
        output = process.read()
    for line in (
        *(f"auth.file: {tmp_path / 'keys'}: line {n}: " for n in (1, 2, 3)),
        f"listen.tls.cert: {tmp_path / 'cert.pem'}: expected PEM with BEGIN CERTIFICATE",
        f"listen.tls.key: {tmp_path / 'absent.pem'}: no such file or directory",
    ):
        assert line in output
    assert FILED not in output
    assert "Traceback" not in output


def test_the_text_of_a_key_is_nowhere(server: str, tmp_path: Path) -> None:
    """Everything that lbproxy writes in a life with keys, right and wrong, at the most talkative level."""
    more = f"{keyed(tmp_path)}\nlog: {{level: debug}}"
    config = write_settings(tmp_path, server, more)
    said = []
    with running(config) as (process, url, admin):
        run(eventually(lambda: httpx.get(f"{admin}/readyz").status_code == 200, "it is ready"))
        for key in (INLINE, FILED, HASHED, ROTATED):
            headers = {"Authorization": f"Bearer {key}", "x-request-id": "a b"}
            asked = (
                httpx.post(f"{url}/v1/completions", json=BODY, headers=headers),
                httpx.post(f"{url}/v1/completions", content=b"{", headers={**headers, "Content-Encoding": "gzip"}),
                httpx.get(f"{url}/v1/models?key={key}", headers=headers),
                httpx.get(f"{url}/nowhere", headers={**headers, "Connection": "authorization"}),
                httpx.get(f"{admin}/admin", headers=headers),
                httpx.get(f"{admin}/metrics", headers=headers),
            )
            said += [f"{one.headers}{one.text}" for one in asked]
        for wrong in (f"auth: {INLINE}", f"auth: {{keys: {INLINE}}}", f"auth: {{keys: [{{nam: x, key: {INLINE} }}]}}"):
            write_settings(tmp_path, server, wrong)
            errors = len(reloads(process, "error"))
            process.process.send_signal(signal.SIGHUP)
            run(eventually(lambda: len(reloads(process, "error")) > errors, "it is refused"))  # noqa: B023
            with Process("check", "--config", str(config), env=ENVIRON) as check:
                assert check.process.wait(30) == 2
                said.append(check.read())
        write_settings(tmp_path, server, more)
        with Process("check", "--config", str(config), env=ENVIRON) as check:
            assert check.process.wait(30) == 0
            said.append(check.read())
            assert "API keys: 3 (team-a, team-b, team-c)" in check.output
        process.stop()
        said.append(process.read())
    everything = "".join(said)
    assert len(everything) > 10_000
    for key in (INLINE, FILED, HASHED, ROTATED, TOKEN):
        for text in (key, sha256(key.encode()).hexdigest()):
            assert text not in everything
            assert text[:20] not in everything
            assert text[-20:] not in everything


# --- TLS --------------------------------------------------------------------------------------------------------------


def encrypted(cert: Path, key: Path) -> str:
    return f"{{host: 127.0.0.1, port: 0, allowed_hosts: [lb], tls: {{cert: {cert}, key: {key}}}}}"


def serial(url: str, context: ssl.SSLContext) -> str:
    """Which certificate a new connection is shown."""
    with httpx.Client(verify=context) as client:
        stream = client.get(f"{url}/v1/models").extensions["network_stream"]
        return str(stream.get_extra_info("ssl_object").getpeercert()["serialNumber"])


@one_process("each worker reads files by itself, within their interval")
def test_certificates_change_under_load_and_a_broken_one_does_not(
    server: str, authority: Authority, tmp_path: Path
) -> None:
    """By SIGHUP and by themselves; nobody fails, whoever connects in between."""
    cert, key = authority.write(tmp_path)
    config = write_settings(tmp_path, server, listen=encrypted(cert, key))
    trusting = authority.client()

    async def main(process: Process, url: str, admin: str) -> None:
        async with load(url, tls=trusting, keep=2, fresh=4) as clients:
            await eventually(lambda: clients.done > 20, "the load runs")
            seen = {await asyncio.to_thread(serial, url, trusting)}
            for n in range(5):
                authority.write(tmp_path)
                if n % 2:
                    process.process.send_signal(signal.SIGHUP)
                await eventually(lambda: len(reloads(process, "info")) > n, "it is read")  # noqa: B023
                seen.add(await asyncio.to_thread(serial, url, trusting))
                assert len(seen) == n + 2
            errors = 0
            good = cert.read_bytes()
            for broken in (
                b"",
                good[:200],
                good.replace(b"A", b"B", 20),
                authority.write(tmp_path)[0].read_bytes() * 0,
            ):
                cert.write_bytes(broken)
                errors += 1
                await eventually(lambda: len(reloads(process, "error")) == errors, "it is refused")  # noqa: B023
                assert await asyncio.to_thread(serial, url, trusting) in seen
            key.unlink()
            process.process.send_signal(signal.SIGHUP)
            await eventually(lambda: len(reloads(process, "error")) > errors, "so is a reload")
            now = clients.done
            await eventually(lambda: clients.done > now + 20, "the load goes on")
        assert clients.failed == []

    with running(config) as (process, url, admin):
        assert url.startswith("https://")
        run(eventually(lambda: httpx.get(f"{admin}/readyz").status_code == 200, "it is ready"))
        run(main(process, url, admin), timeout_s=110)
        assert gauge(admin, "lbproxy_tls_handshake_failures_total") == {"": 0.0}
        assert "Traceback" not in process.read()
        assert "PRIVATE KEY-----" not in process.read()


def test_a_restart_hands_tls_and_keys_on(server: str, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.write(tmp_path)
    config = write_settings(tmp_path, server, keyed(tmp_path), encrypted(cert, key), "5s")
    trusting = authority.client()

    async def main(process: Process, url: str) -> None:
        async with load(url, tls=trusting, more=f"Authorization: Bearer {FILED}\r\n") as clients:
            await eventually(lambda: clients.done > 20, "the load runs")
            process.process.send_signal(signal.SIGUSR2)
            await eventually(lambda: '"the new process accepts' in process.read(), "it restarts")
            await eventually(lambda: process.process.poll() is not None, "the first one ends")
            now = clients.done
            await eventually(lambda: clients.done > now + 20, "the load goes on")
        assert clients.failed == []

    with running(config) as (process, url, admin):
        run(eventually(lambda: httpx.get(f"{admin}/readyz").status_code == 200, "it is ready"))
        try:
            run(main(process, url), timeout_s=110)
        finally:
            for line in process.lines("restart"):
                if isinstance(pid := line.get("pid"), int):
                    os.kill(pid, signal.SIGKILL)


def test_a_successor_that_cannot_read_its_certificate_changes_nothing(
    server: str, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.write(tmp_path)
    config = write_settings(tmp_path, server, listen=encrypted(cert, key))
    with running(config) as (process, url, admin):
        run(eventually(lambda: httpx.get(f"{admin}/readyz").status_code == 200, "it is ready"))
        key.write_text("broken")
        process.process.send_signal(signal.SIGUSR2)
        process.wait_for("the new process accepts no connections, so we continue", within_s=60.0)
        assert serial(url, authority.client())
