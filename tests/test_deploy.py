# SPDX-License-Identifier: Apache-2.0
"""Dockerfile, compose files, units, manifests and Prometheus' settings agree with each other, with lbproxy and with
their specifications.

No container runs here: tests/e2e/test_compose.py runs the same commands as processes. What a file means is judged by
the compose specification's schema (check-jsonschema ships it) and by hadolint; that the files fit together, by these
tests.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lbproxy.commands.cli import _parser
from lbproxy.config.parse import parse
from lbproxy.config.tree import Settings
from tests.support.compose import (
    BASE,
    DOCKERFILE,
    GPU,
    IMAGE,
    PROMETHEUS,
    SETTINGS,
    Instruction,
    image_healthcheck,
    merged,
    project,
    prometheus,
    prometheus_targets,
    stages,
)
from tests.support.docs import DOCS, ROOT, blocks
from tests.support.process import LBPROXY

COMPOSE = shutil.which("docker-compose")
PROJECTS = pytest.mark.parametrize("files", [(BASE,), (BASE, GPU)], ids=["mock", "gpu"])


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool of the development environment."""
    command = [Path(sys.executable).with_name(name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def settings() -> Settings:
    return parse(SETTINGS.read_text(encoding="utf-8"), environ={})


# --- By their specifications ------------------------------------------------------------------------------------------


def follows_compose_spec(file: Path) -> subprocess.CompletedProcess[str]:
    return tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", file)


@pytest.mark.parametrize("file", [BASE, GPU], ids=lambda file: file.name)
def test_a_compose_file_follows_the_specification(file: Path) -> None:
    done = follows_compose_spec(file)
    assert done.returncode == 0, done.stdout


def test_the_merged_files_follow_the_specification(tmp_path: Path) -> None:
    file = tmp_path / "merged.json"
    file.write_text(json.dumps(merged(BASE, GPU)))
    done = follows_compose_spec(file)
    assert done.returncode == 0, done.stdout


def test_the_specification_is_asked(tmp_path: Path) -> None:
    """A misspelt key is found: else the tests above would say nothing."""
    file = tmp_path / "docker-compose.yml"
    file.write_text(BASE.read_text().replace("cap_drop:", "cap_dropp:"))
    done = follows_compose_spec(file)
    assert done.returncode == 1
    assert "cap_dropp" in done.stdout


@pytest.mark.skipif(COMPOSE is None, reason="no docker-compose: not read by its own program; `make test-tools`")
@PROJECTS
def test_docker_compose_itself_takes_the_files(files: tuple[Path, ...], tmp_path: Path) -> None:
    def config(*said: Path) -> subprocess.CompletedProcess[str]:
        named = [word for file in said for word in ("-f", str(file))]
        command = [COMPOSE or "", "--project-directory", str(ROOT), *named, "config", "--quiet"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = config(*files)
    assert done.returncode == 0, done.stderr
    wrong = tmp_path / "docker-compose.yml"
    wrong.write_text(BASE.read_text().replace("cap_drop:", "cap_dropp:"))
    assert "cap_dropp" in config(wrong, *files[1:]).stderr


def test_the_dockerfile_is_without_a_finding() -> None:
    done = tool("hadolint", "--no-color", "--failure-threshold", "style", DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")


# --- The image --------------------------------------------------------------------------------------------------------


def copied() -> list[str]:
    """The files and folders that the build takes from this project."""
    copies = [one.words for stage in stages() for one in stage if one.name in {"COPY", "ADD"}]
    return [source for words in copies if not words[0].startswith("--from=") for source in words[:-1]]


def ignored(path: str) -> bool:
    """By .dockerignore: the last line that matches the path, or a folder that it is in, decides."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    result = False
    for line in lines:
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            places = [PurePosixPath(path), *PurePosixPath(path).parents][:-1]
            names = [place.name if "**/" in line else str(place) for place in places]
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                result = not line.startswith("!")
    return result


def last(name: str) -> Instruction:
    """The final stage's instruction that counts."""
    return [one for one in stages()[-1] if one.name == name][-1]


def test_everything_that_is_copied_is_there_and_sent() -> None:
    assert {"lbproxy", "pyproject.toml", "requirements.lock"} <= set(copied())
    for source in copied():
        assert (ROOT / source).exists(), source
        assert not ignored(source), f"{source} is not sent to the builder"
    readme = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["readme"]
    assert readme in copied(), "the wheel's build reads it"


def test_nothing_else_is_sent_to_the_builder() -> None:
    """A key in a forgotten file must not get into a layer, nor a change of the docs rebuild everything."""
    sent = {path.name for path in ROOT.iterdir() if not ignored(path.name)}
    assert sent == set(copied())
    assert ignored("lbproxy/core/__pycache__")
    assert not ignored("lbproxy/core/balancer.py")


def test_the_image_installs_the_locked_wheels_alone() -> None:
    """Each by its hash; and lbproxy itself without looking for anything more."""
    installs = [
        step.split()
        for stage in stages()
        for one in stage
        if one.name == "RUN"
        for step in one.text.split("&&")
        if re.search(r"\binstall\b", step)
    ]
    system, builder, locked, own = installs
    assert system[0] == "apt-get"
    for one in (builder, locked):
        assert {"--require-hashes", "--only-binary", ":all:"} <= set(one)
    assert {"--no-deps", "/wheels/*.whl"} <= set(own)
    assert all("--no-cache-dir" in one for one in (builder, locked, own))
    (made,) = (one.text.split() for one in stages()[0] if one.name == "RUN" and " wheel " in one.text)
    assert {"--no-deps", "--no-build-isolation", "--no-cache-dir", "."} <= set(made)


@pytest.mark.parametrize("extras", [(), ("otel",), ("replicas", "kv-events"), ("otel", "replicas")])
def test_a_build_argument_says_which_locks_are_installed(extras: tuple[str, ...]) -> None:
    """By default the one without extras; as the build's own shell reads it, with another pip."""
    (argument,) = (one.text for one in stages()[1] if one.name == "ARG")
    assert argument == "EXTRAS="
    (run,) = (one.text for one in stages()[1] if one.name == "RUN" and "$EXTRAS" in one.text)
    script = run.replace("pip ", "echo ")
    environ = {"EXTRAS": " ".join(extras), "PATH": "/usr/bin:/bin"}
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=environ)
    locks = ["requirements.lock", *(f"requirements-{one}.lock" for one in extras)]
    assert [line.split()[-1] for line in said.stdout.splitlines()] == locks
    assert {*locks} <= {*copied()}


def pins(lock: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+==[^ ;\\]+)", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE))


def test_the_locks_agree() -> None:
    """What the tests run on is what all images have, and an extra's packages are those that it names."""
    plain, dev = pins("requirements.lock"), pins("requirements-dev.lock")
    assert pins("requirements-compile.lock") < dev
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("otel", "replicas", "kv-events"):
        locked = pins(f"requirements-{name}.lock")
        assert plain < locked < dev, name
        named = {re.split(r"[<>=[]", one)[0] for one in extras[name]}
        assert named <= {one.partition("==")[0] for one in locked - plain}


def test_all_stages_have_the_python_that_the_environment_was_made_for() -> None:
    bases = {stage[0].words[0] for stage in stages()}
    assert len(bases) == 1
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", bases.pop()), "pinned to a release of Python and of Debian"
    assert len(stages()) == 3


def test_the_image_runs_lbproxy_as_nobody() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (command,) = last("ENTRYPOINT").words
    assert command in scripts
    _parser().parse_args(last("CMD").words)
    assert last("STOPSIGNAL").text == "SIGTERM"
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last("USER").text), "numbers, not root"
    assert "RUN" not in {one.name for one in stages()[-1]}, "nothing is installed as root in the final stage"


def test_the_image_exposes_the_ports_of_the_default_settings() -> None:
    default = parse("endpoints: [http://gpu-1:8000]", environ={})
    assert default.admin is not None
    assert last("EXPOSE").words == [str(default.listen.port), str(default.admin.port)]
    assert f"'127.0.0.1', {default.admin.port}," in image_healthcheck()[-1]


# --- The services -----------------------------------------------------------------------------------------------------


@PROJECTS
def test_lbproxy_reads_the_mounted_settings(files: tuple[Path, ...]) -> None:
    lbproxy = project(*files).services["lbproxy"]
    read = _parser().parse_args(lbproxy.command).config
    assert ROOT / lbproxy.mounts[read] == SETTINGS
    assert last("CMD").words == ["--config", read], "the image's own default is the same path"


@PROJECTS
def test_only_lbproxy_and_prometheus_are_published_and_to_this_machine_alone(files: tuple[Path, ...]) -> None:
    services = project(*files).services
    admin = settings().admin
    assert admin is not None
    assert {name for name, one in services.items() if one.ports} == {"lbproxy", "prometheus", "grafana"}
    assert set(services["lbproxy"].published) == {settings().listen.port, admin.port}
    assert {host for one in services.values() for host, _ in one.published.values()} == {"127.0.0.1"}
    assert (settings().listen.host, admin.host) == ("0.0.0.0", "0.0.0.0"), "else Docker's ports lead to nobody"


@PROJECTS
def test_the_name_that_is_balanced_leads_to_the_servers(files: tuple[Path, ...]) -> None:
    (endpoint,) = settings().endpoints
    name, _, port = endpoint.url.removeprefix("dns+http://").partition(":")
    servers = project(*files).behind(name)
    assert servers
    for server in servers.values():
        assert server.command[server.command.index("--port") + 1] == port
        assert server.healthcheck is not None
        assert f"'127.0.0.1', {port}," in server.healthcheck.command[-1]


@PROJECTS
def test_lbproxy_is_stopped_before_its_servers_and_may_finish(files: tuple[Path, ...]) -> None:
    """Compose stops dependents first; Docker kills what still runs after the grace period."""
    compose = project(*files)
    lbproxy = compose.services["lbproxy"]
    assert set(compose.behind("vllm")) <= set(lbproxy.depends_on)
    assert {one.condition for one in lbproxy.depends_on.values()} == {"service_started"}, "no server is waited for"
    assert lbproxy.stop_grace_s >= settings().drain.deadline + 5


@PROJECTS
def test_there_are_descriptors_for_every_connection(files: tuple[Path, ...]) -> None:
    hard = project(*files).services["lbproxy"].ulimits["nofile"]
    assert hard > 2 * settings().limits.connections + 1024


@PROJECTS
def test_our_containers_have_no_rights(files: tuple[Path, ...]) -> None:
    ours = [one for one in project(*files).services.values() if one.image == IMAGE]
    assert len(ours) == 2
    for one in ours:
        assert (one.read_only, one.cap_drop, one.security_opt) == (True, ["ALL"], ["no-new-privileges:true"])


def test_the_simulated_servers_understand_their_command() -> None:
    arguments = _parser().parse_args(project(BASE).services["vllm"].command)
    assert (arguments.command, arguments.host) == ("mock", "0.0.0.0")
    assert project(BASE).services["vllm"].deploy.replicas == 3


def test_each_real_server_has_a_gpu_of_its_own() -> None:
    servers = project(BASE, GPU).behind("vllm")
    gpus = []
    for server in servers.values():
        assert server.image is not None
        assert re.fullmatch(r"vllm/vllm-openai:v[\d.]+", server.image)
        assert server.deploy.resources is not None
        (device,) = server.deploy.resources.reservations.devices
        assert (device.driver, device.capabilities) == ("nvidia", ["gpu"])
        gpus += device.device_ids
    assert sorted(gpus) == ["0", "1"]


# --- Prometheus -------------------------------------------------------------------------------------------------------


@PROJECTS
def test_prometheus_scrapes_what_is_there(files: tuple[Path, ...]) -> None:
    """Each target is a name and a port of a service, and lbproxy's is its admin listener."""
    compose, admin = project(*files), settings().admin
    assert admin is not None
    mounts = compose.services["prometheus"].mounts
    assert ROOT / mounts["/etc/prometheus/prometheus.yml"] == PROMETHEUS
    assert {source for source in mounts.values() if not source.startswith(".")} <= set(compose.volumes)
    assert [(ROOT / mounts[file]).is_file() for file in prometheus().rule_files] == [True]
    ports = {"lbproxy": str(admin.port), "vllm": settings().endpoints[0].url.rpartition(":")[2]}
    ports |= {"lbproxy-1": str(admin.port), "lbproxy-2": str(admin.port)}
    found = {target.name: target for target in prometheus_targets()}
    assert {name: str(target.port) for name, target in found.items()} == ports
    everything = project(*files, profile="ha")
    for target in found.values():
        assert everything.behind(target.name)
        assert (target.job, target.path) == (re.sub(r"-\d$", "", target.name), "/metrics")


# --- The page ---------------------------------------------------------------------------------------------------------


def test_the_pages_commands_name_files_and_services_that_exist() -> None:
    shown = "".join(block.text for block in blocks(DOCS / "docker.md") if block.language == "sh")
    shown += "".join(block.text for block in blocks(DOCS / "replicas.md") if "docker compose" in block.text)
    shown += "".join(re.findall(r"^# .*docker compose.*$", BASE.read_text() + GPU.read_text(), re.MULTILINE))
    assert (files := re.findall(r"(?<=-f )[\w.-]+", shown))
    assert all((ROOT / file).is_file() for file in files)
    assert (scaled := re.findall(r"--scale (\w+)=", shown))
    assert set(scaled) <= set(project(BASE).services)
    assert (used := re.findall(r"docker compose (?:logs|kill)(?: --\w+)* ([\w-]+)", shown))
    assert set(used) <= set(project(BASE, GPU, profile="ha").services)
    assert {*re.findall(r"--profile (\w+)", shown)} == {"ha"}
    built = re.findall(r"docker build -t (\w+)(?: --build-arg EXTRAS=(\w+))? \.", shown)
    assert {name for name, _ in built} == {IMAGE.removeprefix("${LBPROXY_IMAGE:-").removesuffix("}")}
    assert "replicas" in {extra for _, extra in built}, "the profile's lbproxies need it"


# --- systemd ----------------------------------------------------------------------------------------------------------

UNIT = ROOT / "deploy/systemd/lbproxy.service"
SOCKET = ROOT / "deploy/systemd/lbproxy.socket"


def unit(file: Path) -> dict[str, list[str]]:
    """Keys and what is said of them, in order, whatever the section."""
    found: dict[str, list[str]] = {}
    for line in file.read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_starts_lbproxy_and_outwaits_its_drain() -> None:
    keys = unit(UNIT)
    program, *words = keys["ExecStart"][0].split()
    assert program.endswith("/bin/lbproxy")
    assert _parser().parse_args(words).config
    assert keys["Type"] == ["notify"]
    assert int(keys["TimeoutStopSec"][0]) > Settings.model_fields["drain"].default.deadline


def test_the_socket_unit_listens_where_lbproxy_does() -> None:
    assert unit(SOCKET)["ListenStream"] == [str(Settings.model_fields["listen"].default)]
    assert unit(SOCKET)["FileDescriptorName"] == ["listen"]


DROP_IN = next(one.text for one in blocks(DOCS / "operations.md") if one.text.startswith("[Service]"))
"""For a port below 1024, and files of root."""


def test_the_drop_in_of_the_documents_takes_back_what_the_unit_forbids() -> None:
    keys = {line.partition("=")[0] for line in DROP_IN.splitlines()[1:]} - {"LoadCredential"}
    assert keys == {"AmbientCapabilities", "CapabilityBoundingSet", "PrivateUsers"}
    assert {key: unit(UNIT)[key] for key in keys} == {
        "AmbientCapabilities": [""],
        "CapabilityBoundingSet": [""],
        "PrivateUsers": ["yes"],
    }


@pytest.mark.parametrize("drop_in", ["", DROP_IN], ids=["the unit", "with the drop-in"])
def test_systemd_finds_nothing_wrong_and_little_exposed(drop_in: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("NOT TESTED here: no systemd-analyze on this machine")
    service = tmp_path / UNIT.name
    text = UNIT.read_text()
    service.write_text(text.replace("/opt/lbproxy/bin/lbproxy", sys.executable))
    (tmp_path / SOCKET.name).write_text(SOCKET.read_text())
    (tmp_path / f"{UNIT.name}.d").mkdir()
    (tmp_path / f"{UNIT.name}.d" / "override.conf").write_text(drop_in)
    for arguments in (["verify", str(service)], ["security", "--offline=true", "--threshold=20", str(service)]):
        done = subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Unknown key" not in done.stderr


# --- Kubernetes -------------------------------------------------------------------------------------------------------

MANIFESTS = ROOT / "deploy/kubernetes/lbproxy.yaml"
HA_MANIFESTS = ROOT / "deploy/kubernetes/lbproxy-ha.yaml"
SETS = pytest.mark.parametrize("file", [MANIFESTS, HA_MANIFESTS], ids=["one", "two"])


def manifests(file: Path = MANIFESTS) -> dict[str, dict[str, Any]]:
    """By kind and name."""
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in yaml.safe_load_all(file.read_text())}


@SETS
def test_manifests_follow_the_schema(file: Path) -> None:
    for one in manifests(file).values():
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_the_schema_is_asked() -> None:
    """A misspelt key is found: else the test above would say nothing."""
    wrong = manifests()["Deployment/lbproxy"]
    wrong["spec"]["replica"] = wrong["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@SETS
def test_the_manifests_fit_together_and_with_lbproxy(file: Path) -> None:
    there = manifests(file)
    text = there["ConfigMap/lbproxy"]["data"]["lbproxy.yaml"]
    held = parse(text, environ={})
    pod = there["Deployment/lbproxy"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert held.admin is not None
    assert ports == {"http": held.listen.port, "admin": held.admin.port}
    assert {held.listen.host, held.admin.host} == {"0.0.0.0"}
    folder = container["volumeMounts"][0]["mountPath"]
    assert _parser().parse_args(container["args"]).config == f"{folder}/lbproxy.yaml"
    assert pod["spec"]["terminationGracePeriodSeconds"] > held.drain.deadline
    state = next(mount for mount in container["volumeMounts"] if mount["name"] == "state")
    assert held.state.file == f"{state['mountPath']}/state"
    assert not state.get("readOnly")
    assert {mount["name"] for mount in container["volumeMounts"]} == {one["name"] for one in pod["spec"]["volumes"]}
    servers = there["Service/vllm"]
    assert servers["spec"]["clusterIP"] == "None", "or its name has one address, the service's own"
    assert held.endpoints[0].url == f"dns+http://vllm:{servers['spec']['ports'][0]['port']}"
    labels = pod["metadata"]["labels"]
    for name in ("Deployment/lbproxy", "PodDisruptionBudget/lbproxy"):
        assert there[name]["spec"]["selector"]["matchLabels"] == labels
    assert there["Service/lbproxy"]["spec"]["selector"] == labels
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"/healthz", "/readyz"}


# --- Editors and shells -----------------------------------------------------------------------------------------------


def test_the_schema_that_lbproxy_prints_holds_for_the_example(tmp_path: Path) -> None:
    printed = subprocess.run([*LBPROXY, "schema"], capture_output=True, text=True, timeout=60, check=True).stdout
    schema = tmp_path / "schema.json"
    schema.write_text(printed)
    done = tool("check-jsonschema", "--schemafile", schema, ROOT / "config.example.yaml")
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("endpoints: [http://a:1]\nroutign: {}\n")
    assert "routign" in tool("check-jsonschema", "--schemafile", schema, wrong).stdout


def test_bash_takes_the_completion(tmp_path: Path) -> None:
    """And completes a command, an option, a file, and what a running lbproxy is asked for."""
    printed = subprocess.run([*LBPROXY, "completion", "bash"], capture_output=True, text=True, timeout=60, check=True)
    ask = "COMP_WORDS=(lbproxy {0}); COMP_CWORD=1; _shtab_lbproxy; echo ${{COMPREPLY[@]}}"
    script = tmp_path / "complete.bash"
    (tmp_path / "cfg.yaml").touch()
    asked = [("che", 1), ("--con", 1), ("--config cf", 2), ("drain gpu", 2), ("explain 7", 2)]
    lines = [ask.format(words).replace("CWORD=1", f"CWORD={at}") for words, at in asked]
    running = 'lbproxy() { test "$2" = endpoints && echo gpu-1 gpu-2 cpu || echo 7a 8b; }'
    script.write_text("\n".join([printed.stdout, running, *lines, ""]))
    done = subprocess.run(["bash", script], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["check", "--config", "cfg.yaml", "gpu-1", "gpu-2", "7a"], done.stderr
