# SPDX-License-Identifier: Apache-2.0
"""Several lbproxies in Docker and Kubernetes: the profile `ha` and lbproxy-ha.yaml, as test_deploy.py does for one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lbproxy.commands.cli import _parser
from lbproxy.config.parse import parse
from tests.support.compose import BASE, HA_SETTINGS, HAPROXY, IMAGE, project
from tests.support.docs import DOCS, ROOT, blocks
from tests.test_deploy import COMPOSE, HA_MANIFESTS, manifests, settings

KEEPALIVED = shutil.which("keepalived") or shutil.which("/usr/sbin/keepalived")
HAPROXY_PROGRAM = shutil.which("haproxy") or shutil.which("/usr/sbin/haproxy")


def test_two_lbproxies_in_kubernetes_find_their_valkey() -> None:
    there = manifests(HA_MANIFESTS)
    held = parse(there["ConfigMap/lbproxy"]["data"]["lbproxy.yaml"], environ={})
    service, valkey = there["Service/valkey"]["spec"], there["Deployment/valkey"]["spec"]
    assert held.replicas.url is not None
    assert held.replicas.url.get_secret_value() == f"redis://valkey:{service['ports'][0]['port']}"
    assert there["Deployment/lbproxy"]["spec"]["replicas"] == 2
    (container,) = valkey["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "redis", "containerPort": service["ports"][0]["port"]}]
    assert {"noeviction", "256mb"} <= {*container["args"]}
    labels = valkey["template"]["metadata"]["labels"]
    policy = there["NetworkPolicy/valkey"]["spec"]
    assert labels == service["selector"] == valkey["selector"]["matchLabels"] == policy["podSelector"]["matchLabels"]
    (allowed,) = policy["ingress"][0]["from"]
    assert (
        allowed["podSelector"]["matchLabels"] == there["Deployment/lbproxy"]["spec"]["template"]["metadata"]["labels"]
    )


def test_the_replicas_of_the_profile_find_each_other_and_their_servers() -> None:
    services = project(BASE, profile="ha").services
    held = parse(HA_SETTINGS.read_text(encoding="utf-8"), environ={})
    assert held.replicas.url is not None
    name, _, port = held.replicas.url.get_secret_value().removeprefix("redis://").partition(":")
    assert services[name].command[0] == "valkey-server"
    assert port == "6379"
    assert (held.endpoints, str(held.listen), str(held.admin)) == (
        settings().endpoints,
        str(settings().listen),
        str(settings().admin),
    )
    replicas = [one for key, one in services.items() if key in {"lbproxy-1", "lbproxy-2"}]
    assert len({one.hostname for one in replicas}) == 2
    for one in replicas:
        assert one.image == IMAGE
        read = _parser().parse_args(one.command).config
        assert ROOT / one.mounts[read] == HA_SETTINGS
        assert {"vllm", name} == {*one.depends_on}
        assert one.stop_grace_s >= held.drain.deadline + 5
        assert one.ulimits["nofile"] > 2 * held.limits.connections + 1024
    for one in services.values():
        assert {host for host, _ in one.published.values()} <= {"127.0.0.1"}
        assert (one.cap_drop, one.security_opt) == (["ALL"], ["no-new-privileges:true"])


def test_the_front_leads_to_the_replicas_that_are_ready() -> None:
    held = parse(HA_SETTINGS.read_text(encoding="utf-8"), environ={})
    services = project(BASE, profile="ha").services
    text = HAPROXY.read_text(encoding="utf-8")
    assert held.admin is not None
    assert f"check port {held.admin.port} inter 1s fall 2 " in text
    assert held.drain.lame_duck > 2 * 1 + 2, "the front notices in `inter` times `fall`, and a check may take 2 s"
    servers = re.findall(r"^    server (\S+) (\S+):(\d+)$", text, re.MULTILINE)
    assert servers == [(name, name, str(held.listen.port)) for name in ("lbproxy-1", "lbproxy-2")]
    assert {name for name, _, _ in servers} == {*services["front"].depends_on}
    (connections,) = re.findall(r"maxconn (\d+)", text)
    assert services["front"].ulimits["nofile"] > 2 * int(connections) + 1000, "or it does not start"
    (bound,) = re.findall(r"bind :(\d+)", text)
    assert {*services["front"].published} == {int(bound)}
    assert {ROOT / path for path in services["front"].mounts.values()} == {HAPROXY}


@pytest.mark.skipif(HAPROXY_PROGRAM is None, reason="no haproxy: its settings NOT checked; `make test-tools`")
def test_haproxy_takes_its_settings(tmp_path: Path) -> None:
    def check(text: str) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "haproxy.cfg"
        file.write_text(text)
        command = [HAPROXY_PROGRAM or "", "-c", "-f", str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    text = HAPROXY.read_text(encoding="utf-8")
    done = check(text)
    assert done.returncode == 0, done.stderr
    assert check(text.replace("default-server", "default-servers")).returncode != 0


@pytest.mark.skipif(COMPOSE is None, reason="no docker-compose: not read by its own program; `make test-tools`")
def test_docker_compose_itself_takes_the_profile() -> None:
    command = [
        COMPOSE or "",
        "--project-directory",
        str(ROOT),
        "-f",
        str(BASE),
        "--profile",
        "ha",
        "config",
        "--services",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert {*done.stdout.split()} == {*project(BASE, profile="ha").services}


@pytest.mark.skipif(KEEPALIVED is None, reason="no keepalived: its settings NOT checked; `make test-tools`")
def test_keepalived_takes_the_settings_of_the_page(tmp_path: Path) -> None:
    def complaints(text: str) -> list[str]:
        """The exit status says nothing: 2.2.7 may end its own check by a signal."""
        file = tmp_path / "keepalived.conf"
        file.write_text(text.replace("eth0", "lo"))
        command = [KEEPALIVED or "", "-t", "-l", "-f", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return [line for line in done.stderr.splitlines() if "loopback interface" not in line]

    (text,) = (block.text for block in blocks(DOCS / "replicas.md") if "vrrp_script" in block.text)
    assert complaints(text) == []
    assert "Unknown keyword" in complaints(text.replace("advert_int", "advert_integer"))[0]
