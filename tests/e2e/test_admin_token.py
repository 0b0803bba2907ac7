# SPDX-License-Identifier: Apache-2.0
"""The token that lbproxy makes for its admin API: who finds it, who does not, and what nobody can do without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from lbproxy.control.admin.made_token import read_token
from tests.support.process import LBPROXY, Process, lbproxy

NOBODY = "{url: 'http://127.0.0.1:9', name: gpu-1, health: null, metrics: null}"
OTHER = "{url: 'http://127.0.0.2:9', name: gpu-2, health: null, metrics: null}"


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run([*LBPROXY, *arguments], capture_output=True, text=True, check=False, timeout=60, env=env)


def draining(admin: str) -> list[bool]:
    return [one["draining"] for one in httpx.get(f"{admin}/admin/state").json()["endpoints"]]


def test_a_proxy_on_this_machine_that_says_nothing_changes_nothing(tmp_path: Path) -> None:
    """nginx and HAProxy, as they come, send none of the fields that say for whom; their Host is the address here."""
    entry = {"url": "http://192.0.2.2:8000", "name": "evil", "health": None}
    calls: list[tuple[str, str, object]] = [
        ("POST", "endpoints/gpu-1/drain", {}),
        ("POST", "endpoints/gpu-1/sleep", {}),
        ("POST", "endpoints", entry),
        ("DELETE", "endpoints/gpu-1", None),
        ("PUT", "log-level", {"level": "debug"}),
        ("POST", "reload", {}),
    ]
    with lbproxy(tmp_path, [NOBODY, OTHER]) as (process, _, admin), httpx.Client(base_url=f"{admin}/admin/") as client:
        before = client.get("endpoints").json()["endpoints"]
        for method, path, body in calls:
            for guess in ({}, {"authorization": "Bearer x"}, {"authorization": f"Bearer {'A' * 43}"}):
                answer = client.request(method, path, json=body, headers=guess)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
                assert "`lbproxy admin-token` prints it" in answer.json()["error"]["message"]
        after = client.get("endpoints").json()["endpoints"]
        assert [(one["name"], one["draining"]) for one in after] == [(one["name"], False) for one in before]
        assert not process.lines("admin")


@pytest.mark.parametrize("more", ["", "workers: 2\n"])
def test_the_commands_find_the_token_by_themselves(tmp_path: Path, more: str) -> None:
    with lbproxy(tmp_path, [NOBODY, OTHER], more) as (process, _, admin):
        path = Path(httpx.get(f"{admin}/admin/state").json()["token_file"])
        assert path.name == f"lbproxy-{admin.rpartition(':')[2]}.token"
        assert path.stat().st_mode & 0o777 == 0o600
        done = command("drain", "gpu-1", "--force", "--admin", admin)
        assert (done.returncode, draining(admin)) == (0, [True, False]), done
        assert command("undrain", "gpu-1", "--admin", admin).returncode == 0
        printed = command("admin-token", "--admin", admin)
        assert printed.stdout == path.read_text() + "\n"
        bearer = {"authorization": f"Bearer {printed.stdout.strip()}"}
        assert httpx.put(f"{admin}/admin/log-level", json={"level": "info"}, headers=bearer).status_code == 200
        link = command("dashboard", "--admin", admin).stdout
        assert link == f"{admin}/dashboard#token={path.read_text()}\n"
        assert path.read_text() not in httpx.get(f"{admin}/admin/config").text + process.read()
        assert process.stop() == 0
        assert not path.exists(), "it goes with the process"


def test_a_restart_keeps_the_token_and_a_crash_does_not(tmp_path: Path) -> None:
    with lbproxy(tmp_path, [NOBODY]) as (process, _, admin):
        path = Path(httpx.get(f"{admin}/admin/state").json()["token_file"])
        token, inode = path.read_text(), path.stat().st_ino
        process.process.send_signal(signal.SIGUSR2)
        successor = int(process.wait_for(r"the new process accepts connections: process (\d+)")[1])
        process.process.wait(60)
        assert (path.read_text(), path.stat().st_ino == inode) == (token, False), "the old one left the new one's file"
        done = command("drain", "gpu-1", "--force", "--admin", admin)
        assert (done.returncode, draining(admin)) == (0, [True]), done
        os.kill(successor, signal.SIGKILL)
    assert path.read_text() == token
    config = tmp_path / "cfg.yaml"
    config.write_text(config.read_text().replace("admin: 127.0.0.1:0", f"admin: {admin.removeprefix('http://')}"))
    with Process("--config", str(config)) as process:
        process.wait_for("listens on")
        assert path.read_text() != token, "somebody else may have had the port, and have been sent it"


def test_without_a_folder_only_a_configured_token_changes_things(tmp_path: Path) -> None:
    config = tmp_path / "cfg.yaml"
    settings = f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\ndrain: {{lame_duck: 0s}}\nendpoints: [{NOBODY}]\n"
    config.write_text(settings)
    with Process("--config", str(config), env={"XDG_RUNTIME_DIR": str(tmp_path / "missing")}) as process:
        admin = process.wait_for(r"admin on (http://[\w.:]+)")[1]
        process.wait_for('"event":"admin"')
        said = [line["message"] for line in process.lines("admin")]
        assert said == [f"the admin API changes nothing: {_FOLDERS}"]
        assert httpx.get(f"{admin}/admin/state").json()["token_file"] is None
        done = command("drain", "gpu-1", "--force", "--admin", admin)
        assert (done.returncode, draining(admin)) == (1, [False])
        assert "or state.file (its folder is used), or admin.token, or make admin a Unix socket" in done.stderr
        assert command("admin-token", "--admin", admin).returncode == 1
        config.write_text(settings.replace("admin: 127.0.0.1:0", f"admin: {{host: 127.0.0.1, port: 0, token: {SET}}}"))
        process.process.send_signal(signal.SIGHUP)
        process.wait_for("settings reloaded")
        done = command("drain", "gpu-1", "--force", "--admin", admin, LBPROXY_ADMIN_TOKEN=SET)
        assert done.returncode == 0, done.stderr


def test_a_reload_that_sets_a_token_ends_the_one_that_was_made(tmp_path: Path) -> None:
    with lbproxy(tmp_path, [NOBODY]) as (process, _, admin):
        path = Path(httpx.get(f"{admin}/admin/state").json()["token_file"])
        made = {"authorization": f"Bearer {path.read_text()}"}
        config = tmp_path / "cfg.yaml"
        before = config.read_text()
        config.write_text(before.replace("admin: 127.0.0.1:0", f"admin: {{host: 127.0.0.1, port: 0, token: {SET}}}"))
        process.process.send_signal(signal.SIGHUP)
        process.wait_for("settings reloaded")
        assert httpx.get(f"{admin}/admin/state", headers=made).status_code == 401
        given = {"authorization": f"Bearer {SET}"}
        assert httpx.get(f"{admin}/admin/state", headers=given).json()["token_file"] is None
        assert not path.exists()
        config.write_text(before)
        assert httpx.post(f"{admin}/admin/reload", headers=given).status_code == 200
        assert read_token(str(path)) != made["authorization"].removeprefix("Bearer ")


def test_over_a_unix_socket_nothing_needs_a_token(tmp_path: Path) -> None:
    config, path = tmp_path / "cfg.yaml", tmp_path / "admin.sock"
    config.write_text(f"listen: 127.0.0.1:0\nadmin: unix:{path}\nendpoints: [{NOBODY}]\n")
    with Process("--config", str(config)) as process:
        process.wait_for("listens on")
        done = command("drain", "gpu-1", "--force", "--admin", f"unix:{path}")
        assert done.returncode == 0, done.stderr
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/admin/state").json()["token_file"] is None
            assert client.post("/admin/endpoints/gpu-1/undrain").json()["draining"] is False


# --- Who is not lbproxy ----------------------------------------------------------------------------------------------


@contextmanager
def impostor(host: str, token_file: object) -> Iterator[tuple[str, list[str]]]:
    """Something that names this file as that of its token; its URL, and what it was sent as proof."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.extend(self.headers.get_all("authorization", []))
            named = token_file(self.server.server_port) if callable(token_file) else token_file  # type: ignore[attr-defined]
            body = json.dumps({"endpoints": [], "token_file": named, "name": "x", "in_flight": 0}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the library's name

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}", sent
        finally:
            server.shutdown()
            thread.join()


def test_the_command_line_sends_the_token_to_nobody_else(tmp_path: Path) -> None:
    """A listener on another port that names the file of this one's token, or files of other kinds, gets nothing."""
    secret = tmp_path / "secret"
    secret.write_text("x" * 43)
    secret.chmod(0o600)

    def link(port: int) -> str:
        path = tmp_path / f"lbproxy-{port}.token"
        if not path.is_symlink():
            path.symlink_to(secret)
        return str(path)

    def loose(port: int) -> str:
        path = tmp_path / "loose" / f"lbproxy-{port}.token"
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * 43)
        path.chmod(0o644)
        return str(path)

    with lbproxy(tmp_path, [NOBODY]) as (_, _, admin):
        own = httpx.get(f"{admin}/admin/state").json()["token_file"]
        for named in (own, str(secret), "/etc/passwd", f"lbproxy-{admin.rpartition(':')[2]}.token", 7, link, loose):
            with impostor("127.0.0.1", named) as (url, sent):
                done = command("undrain", "x", "--admin", url)
                assert (done.returncode, sent) == (1, []), (named, done)
                assert "Traceback" not in done.stderr
                assert command("admin-token", "--admin", url).stdout == ""


def test_the_token_is_sent_for_changes_only(tmp_path: Path) -> None:
    def good(port: int) -> str:
        path = tmp_path / f"lbproxy-{port}.token"
        path.write_text("x" * 43)
        path.chmod(0o600)
        return str(path)

    with impostor("127.0.0.1", good) as (url, sent):
        command("status", "--json", "--admin", url)
        command("explain", "x", "--admin", url)
        command("admin-token", "--admin", url)
        assert sent == []
        assert command("undrain", "x", "--admin", url).returncode == 0
        assert sent == [f"Bearer {'x' * 43}"]


_FOLDERS = "set admin.token, or a folder for a token in $RUNTIME_DIRECTORY or $XDG_RUNTIME_DIR"
SET = "0123456789abcdef0123"
