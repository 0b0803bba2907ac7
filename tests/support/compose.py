# SPDX-License-Identifier: Apache-2.0
"""The compose files, the settings under deploy/compose/ and the Dockerfile as data, for tests that hold them together.

`project` reads compose files and merges them as Compose does; of what a service may say, `Service` names the keys that
these files use, and any other is an error here, so that no key goes untested unseen. (That a key exists at all is the
compose specification's schema's to say, in tests/test_deploy.py.)
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field

from lbproxy.config.values import duration
from tests.support.docs import ROOT

BASE = ROOT / "docker-compose.yml"
GPU = ROOT / "docker-compose.gpu.yml"
DOCKERFILE = ROOT / "Dockerfile"
SETTINGS = ROOT / "deploy/compose/lbproxy.yaml"
HA_SETTINGS = ROOT / "deploy/compose/lbproxy-ha.yaml"
HAPROXY = ROOT / "deploy/compose/haproxy.cfg"
PROMETHEUS = ROOT / "deploy/compose/prometheus.yml"

IMAGE = "${LBPROXY_IMAGE:-lbproxy}"
"""Built once, for all services that run lbproxy."""

_DURATION = duration("0ms", "24h")


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Healthcheck(Model):
    test: list[str]
    interval: str
    timeout: str
    retries: int
    start_period: str

    @property
    def command(self) -> list[str]:
        """What runs in the container, without a shell."""
        assert self.test[0] == "CMD"
        return self.test[1:]


class Dependency(Model):
    condition: str


class Network(Model):
    aliases: list[str]


class Device(Model):
    driver: str
    device_ids: list[str]
    capabilities: list[str]


class Reservations(Model):
    devices: list[Device]


class Resources(Model):
    reservations: Reservations


class Deploy(Model):
    replicas: int = 1
    resources: Resources | None = None


class Service(Model):
    profiles: list[str] = []
    hostname: str | None = None
    user: str | None = None
    image: str | None = None
    command: list[str] = []
    volumes: list[str] = []
    tmpfs: list[str] = []
    ports: list[str] = []
    environment: list[str] = []
    depends_on: dict[str, Dependency] = {}
    networks: dict[str, Network] = {}
    deploy: Deploy = Deploy()
    healthcheck: Healthcheck | None = None
    stop_grace_period: str = "10s"
    ulimits: dict[str, int] = {}
    shm_size: str = "64mb"
    read_only: bool = False
    cap_drop: list[str] = []
    security_opt: list[str] = []
    restart: str = "no"

    @property
    def stop_grace_s(self) -> float:
        return float(_DURATION.read(self.stop_grace_period))

    @property
    def published(self) -> dict[int, tuple[str, int]]:
        """Container port -> address and port on the host."""
        split = [one.split(":") for one in self.ports]
        return {int(inside): (host, int(outside)) for host, outside, inside in split}

    @property
    def mounts(self) -> dict[str, str]:
        """Path in the container -> path in this project, or a volume's name; all but volumes are read-only."""
        split = [one.split(":") for one in self.volumes]
        assert all(rest == ["ro"] for source, _, *rest in split if source.startswith(".")), self.volumes
        return {target: source for source, target, *_ in split}


class Project(Model):
    services: dict[str, Service]
    volumes: dict[str, None] = {}

    def behind(self, name: str) -> dict[str, Service]:
        """The services that have at least one container, and whose containers a DNS name leads to."""
        return {
            key: one
            for key, one in self.services.items()
            if one.deploy.replicas and (key == name or any(name in net.aliases for net in one.networks.values()))
        }


def merged(*files: Path) -> dict[str, object]:
    """What Compose makes of several files, `x-` keys left out."""
    result: dict[str, object] = {}
    for file in files:
        _merge(result, yaml.safe_load(file.read_text(encoding="utf-8")))
    return {key: value for key, value in result.items() if not key.startswith("x-")}


def project(*files: Path, profile: str | None = None) -> Project:
    """Without services of profiles, but for this one."""
    whole = Project.model_validate(merged(*files))
    used = {name: one for name, one in whole.services.items() if not one.profiles or profile in one.profiles}
    return whole.model_copy(update={"services": used})


def _merge(into: dict[str, object], more: dict[str, object]) -> None:
    """Mappings are merged, later values win. How lists are depends on the key; so far none meets another."""
    for key, value in more.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        else:
            assert not (isinstance(old, list) and isinstance(value, list)), f"{key}: say how this list is merged"
            into[key] = value


class Target(NamedTuple):
    """What Prometheus scrapes."""

    job: str
    name: str
    port: int
    path: str


class StaticTargets(Model):
    targets: list[str]


class DnsTargets(Model):
    names: list[str]
    type: str
    port: int
    refresh_interval: str


class Job(Model):
    job_name: str
    metrics_path: str
    static_configs: list[StaticTargets] = []
    dns_sd_configs: list[DnsTargets] = []


class Prometheus(Model):
    global_: dict[str, str] = Field(alias="global")
    rule_files: list[str]
    scrape_configs: list[Job]


def prometheus() -> Prometheus:
    """deploy/compose/prometheus.yml."""
    return Prometheus.model_validate(yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8")))


def prometheus_targets() -> list[Target]:
    """Those of deploy/compose/prometheus.yml."""
    config = prometheus()
    found = []
    for job in config.scrape_configs:
        listed = [target.rpartition(":") for group in job.static_configs for target in group.targets]
        found += [Target(job.job_name, name, int(port), job.metrics_path) for name, _, port in listed]
        resolved = [(name, group) for group in job.dns_sd_configs for name in group.names]
        assert all(group.type == "A" for _, group in resolved)
        found += [Target(job.job_name, name, group.port, job.metrics_path) for name, group in resolved]
    return found


class Instruction(NamedTuple):
    """One of a Dockerfile, such as COPY."""

    name: str
    text: str
    """All that follows, on one line."""

    @property
    def words(self) -> list[str]:
        """As a shell, or for the JSON form as JSON, would split them."""
        form: object = yaml.safe_load(self.text) if self.text.startswith("[") else None
        return [str(word) for word in form] if isinstance(form, list) else shlex.split(self.text)


def stages() -> list[list[Instruction]]:
    """The Dockerfile's instructions, each stage from its FROM on."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: list[list[Instruction]] = []
    for line in filter(None, re.sub(r"\s*\\\n\s*", " ", text).splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, rest.strip()))
    return found


def image_healthcheck() -> list[str]:
    """The command of the Dockerfile's HEALTHCHECK."""
    text = next(one.text for one in stages()[-1] if one.name == "HEALTHCHECK")
    return Instruction("CMD", text.partition("CMD ")[2]).words
