# SPDX-License-Identifier: Apache-2.0
"""Servers that register themselves, as docs/discovery.md says it: its settings and its container's command are run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.docs import DOCS, blocks
from tests.support.ports import free_port
from tests.support.process import Process, mock

TOKEN = "0123456789abcdef0123456789abcdef"
ENV = {"LBPROXY_ADMIN_TOKEN": TOKEN}
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SETTINGS, COMPOSE = (
    next(one.text for one in blocks(DOCS / "discovery.md") if mark in one.text)
    for mark in ("endpoints: []", "command: [register")
)


def settings_of(folder: Path, more: str = "") -> tuple[Path, str, str]:
    """The documented settings, on free ports of this machine: the file, and the URLs of the two listeners."""
    listen, admin = free_port(), free_port()
    text = SETTINGS.replace("0.0.0.0:8080", f"127.0.0.1:{listen}").replace(
        "0.0.0.0, port: 9901", f"127.0.0.1, port: {admin}"
    )
    assert text.count("127.0.0.1") == 2
    config = folder / "cfg.yaml"
    config.write_text(f"{text}drain: {{lame_duck: 0s}}\n{more}")
    return config, f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}"


def command(url: str, admin: str, every: str = "10s") -> list[str]:
    """The documented command, for a server and an lbproxy of this test."""
    written = yaml.safe_load(COMPOSE)["services"]["register"]["command"]
    places = {"http://${ADDRESS}:8000": url, "http://${LBPROXY}:9901": admin, "10s": every}
    assert places.keys() <= set(written)
    return [places.get(one, one) for one in written]


def until(true: Callable[[], Any], within_s: float = 90.0) -> Any:
    end = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


def state_of(admin: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{admin}/admin/state", headers=BEARER, timeout=20).json()
    return found


def endpoints(admin: str) -> dict[str, dict[str, Any]]:
    """Those that are no more leaving, by name."""
    try:
        found = httpx.get(f"{admin}/admin/endpoints", headers=BEARER, timeout=20).json()["endpoints"]
    except httpx.TransportError:  # between two processes
        return {}
    return {one["name"]: one for one in found if not one["leaving"]}


def status_of_a_request(listen: str) -> int:
    body = {"model": "sim", "prompt": "x", "max_tokens": 1}
    return httpx.post(f"{listen}/v1/completions", json=body, timeout=60).status_code


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_a_server_that_registers_is_used_until_it_stops(tmp_path: Path, workers: str) -> None:
    config, listen, admin = settings_of(tmp_path, workers)
    with mock() as (_, url), Process("--config", str(config), env=ENV) as lbproxy:
        lbproxy.wait_for("listens on")
        assert status_of_a_request(listen) == 503
        with Process(*command(url, admin), env=ENV) as register:
            register.wait_for("registered 127.0.0.1:[0-9]+, renewed every 10 s")
            (name,) = until(lambda: endpoints(admin))
            assert endpoints(admin)[name]["from"] == "registered"
            assert 0.0 < endpoints(admin)[name]["lease_s"] <= 30.0
            until(lambda: status_of_a_request(listen) == 200)
            config.write_text(f"{config.read_text()}log: {{access: false}}\n")
            lbproxy.process.send_signal(signal.SIGHUP)
            lbproxy.wait_for("settings reloaded")
            assert [*endpoints(admin)] == [name]
            assert status_of_a_request(listen) == 200
            pid = state_of(admin)["pid"]
            lbproxy.process.send_signal(signal.SIGUSR2)
            lbproxy.wait_for("the new process accepts connections")
            until(lambda: state_of(admin)["pid"] != pid)
            assert [*endpoints(admin)] == [name], "handed over"
            until(lambda: status_of_a_request(listen) == 200)
            if workers:
                pid = state_of(admin)["pid"]
                os.kill(pid, signal.SIGKILL)
                until(lambda: name in endpoints(admin) and state_of(admin)["pid"] != pid)
                assert endpoints(admin)[name]["from"] == "registered", "the next balancer process knows it"
                until(lambda: status_of_a_request(listen) == 200)
            assert register.stop() == 0
            register.wait_for(f"removed {name}; what runs there finishes")
        assert endpoints(admin) == {}
        assert status_of_a_request(listen) == 503


def test_one_that_vanishes_is_removed_and_one_that_moves_is_replaced(tmp_path: Path) -> None:
    """Its requests finish; a name of the settings is refused, and tried again."""
    config, listen, admin = settings_of(tmp_path)
    with (
        mock("--speed", "1") as (_, first),
        mock() as (_, second),
        Process("--config", str(config), env=ENV) as lbproxy,
    ):
        lbproxy.wait_for("listens on")

        def entry(url: str) -> str:
            return f"{{url: '{url}', name: gpu}}"

        with Process(*command(entry(first), admin, "2s"), env=ENV) as register:
            register.wait_for("registered gpu")
            until(lambda: status_of_a_request(listen) == 200)
            body = {"model": "sim", "prompt": "x", "max_tokens": 300, "stream": True, "ignore_eos": True}
            with httpx.stream("POST", f"{listen}/v1/completions", json=body, timeout=90) as stream:
                lines = stream.iter_lines()
                next(lines)
                register.kill()
                with Process(*command(entry(second), admin, "2s"), env=ENV) as other:
                    other.wait_for("registered gpu")
                    until(lambda: endpoints(admin).get("gpu", {}).get("url") == second)
                    assert [line for line in lines if line][-1] == "data: [DONE]", "it drains"
                    until(lambda: status_of_a_request(listen) == 200)
                    other.kill()
                until(lambda: endpoints(admin) == {})
        lbproxy.wait_for("not renewed, and removed: endpoint gpu")
        assert status_of_a_request(listen) == 503
        with Process(*command(entry(first), admin, "2s"), env=ENV) as register:
            register.wait_for("registered gpu")
            config.write_text(config.read_text().replace("endpoints: []", f"endpoints: [{entry(first)}]"))
            lbproxy.process.send_signal(signal.SIGHUP)
            register.wait_for("There is an endpoint gpu that did not register itself.; trying again")
            until(lambda: endpoints(admin)["gpu"]["lease_s"] is None)
            config.write_text(config.read_text().replace(f"endpoints: [{entry(first)}]", "endpoints: []"))
            lbproxy.process.send_signal(signal.SIGHUP)
            register.wait_for("registered gpu(?s:.*)registered gpu")


def test_one_that_stops_does_not_remove_who_has_its_name_by_then(tmp_path: Path) -> None:
    """As in a restart in which the new server is there before the old one goes."""
    config, listen, admin = settings_of(tmp_path)
    with mock() as (_, first), mock() as (_, second), Process("--config", str(config), env=ENV) as lbproxy:
        lbproxy.wait_for("listens on")
        with Process(*command(f"{{url: '{first}', name: gpu}}", admin, "60s"), env=ENV) as old:
            old.wait_for("registered gpu")
            with Process(*command(f"{{url: '{second}', name: gpu}}", admin, "60s"), env=ENV) as new:
                new.wait_for("registered gpu")
                old.process.send_signal(signal.SIGTERM)
                old.wait_for("gpu is not this one any more")
                assert old.process.wait(60) == 0
                assert endpoints(admin)["gpu"]["url"] == second
                until(lambda: status_of_a_request(listen) == 200)
                new.process.send_signal(signal.SIGTERM)
                new.wait_for("removed gpu")
                until(lambda: endpoints(admin) == {})
