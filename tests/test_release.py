# SPDX-License-Identifier: Apache-2.0
"""A release can be made: versions agree, wheels are the same from every build and run where they are installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from lbproxy import __version__
from lbproxy.processes.process import NOT_COMPILED
from release.install import WARNING, InstallError, exercise, kind_of
from release.notes import install_lines, notes, runs_on
from release.wheels import PIP, build, copy_source, differences, digest, run
from tests.support.docs import DOCS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def check_schema(schema: str, file: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("check-jsonschema")
    command: list[str | Path] = [program, "--builtin-schema", schema, file]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# --- What says the version --------------------------------------------------------------------------------------------


def test_the_changelog_has_this_version_and_room_for_the_next() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - 20\d\d-\d\d-\d\d", heads[1])


def test_the_citation_is_of_this_version_and_follows_its_schema(tmp_path: Path) -> None:
    file = ROOT / "CITATION.cff"
    assert yaml.safe_load(file.read_text())["version"] == __version__
    json_form = tmp_path / "citation.json"  # a date of YAML is not a string, as the schema wants it
    json_form.write_text(json.dumps(yaml.load(file.read_text(), yaml.BaseLoader)))
    done = check_schema("vendor.citation-file-format", json_form)
    assert done.returncode == 0, done.stdout


def test_the_page_on_upgrades_has_the_versions_of_what_is_stored_and_exchanged() -> None:
    from lbproxy.core.replicas import batches  # noqa: PLC0415
    from lbproxy.core.saved import pieces  # noqa: PLC0415

    page = (DOCS / "upgrade.md").read_text()
    assert f"## {__version__}\n" in page
    assert f"| `state.file` | {pieces.VERSION} |" in page
    assert f"| batches between replicas | {batches.VERSION} |" in page


# --- Wheels -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of Python modules alone, of the files that git knows."""
    files = tmp_path_factory.mktemp("files")
    copy_source(files)
    return build(Path(sys.executable), files, tmp_path_factory.mktemp("wheels"), compiled=False)


def test_a_second_build_at_another_time_in_another_folder_is_the_same(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "elsewhere"
    files.mkdir()
    copy_source(files)
    for file in files.rglob("*.py"):
        os.utime(file, (1_500_000_000, 1_500_000_000))
    old = os.umask(0o077)
    try:
        second = build(Path(sys.executable), files, tmp_path / "again", compiled=False)
    finally:
        os.umask(old)
    assert differences(wheel, second) == []
    assert digest(wheel) == digest(second)


def test_what_a_wheel_installs_serves(wheel: Path, tmp_path: Path) -> None:
    """Into a folder of its own, so that nothing of this checkout is imported."""
    assert wheel.name == f"lbproxy-{__version__}-py3-none-any.whl"
    site = tmp_path / "site"
    run(Path(sys.executable), *PIP, "install", "--no-deps", "--no-index", "--target", site, wheel)
    env = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    found = run(sys.executable, "-c", "import lbproxy; print(lbproxy.__file__)", env=env)
    assert found.startswith(str(site))
    command = [sys.executable, "-m", "lbproxy"]
    exercise(command, env, tmp_path, version=f"{__version__} ({kind_of(wheel)})")
    with pytest.raises(InstallError, match="--version says"):
        exercise(command, env, tmp_path, version=f"{__version__} (compiled)")


def test_the_warning_that_is_looked_for_is_the_one_that_is_logged() -> None:
    assert NOT_COMPILED.startswith(WARNING)


def test_the_notes_have_the_version_s_changes_and_a_line_for_each_wheel() -> None:
    wheels = [
        f"lbproxy-{__version__}-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        f"lbproxy-{__version__}-cp313-cp313-musllinux_1_2_aarch64.whl",
        f"lbproxy-{__version__}-py3-none-any.whl",
    ]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    text = notes(changelog, wheels, "https://host/releases/v1")
    before, _, after = text.partition("## Install")
    assert before.strip()
    assert before.strip() in changelog
    assert "Unreleased" not in text
    for wheel in wheels:
        assert "\n".join(install_lines(f"https://host/releases/v1/{wheel}")) in after
    assert [runs_on(wheel) for wheel in wheels[:2]] == ["Python 3.11, Linux, x86-64", "Python 3.13, Alpine, ARM"]
    with pytest.raises(ValueError, match="nothing of"):
        notes("## Unreleased\n", wheels, "")


def test_where_nothing_compiles_a_build_that_must_fails(tmp_path: Path) -> None:
    copy_source(tmp_path)
    env = {**os.environ, "CC": "no-such-compiler", "LBPROXY_COMPILED": "1"}
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "there is no no-such-compiler" in done.stderr


# --- Workflows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_follows_the_schema(file: Path) -> None:
    done = check_schema("vendor.github-workflows", file)
    assert done.returncode == 0, done.stdout


def test_the_schema_of_workflows_is_asked(tmp_path: Path) -> None:
    """A misspelt key is found: else the test above would say nothing."""
    file = tmp_path / "ci.yml"
    file.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in check_schema("vendor.github-workflows", file).stdout


def zizmor(file: Path) -> subprocess.CompletedProcess[str]:
    """Its findings of a workflow that are more than advice."""
    program = Path(sys.executable).with_name("zizmor")
    options = ("--offline", "--no-progress", "--min-severity", "medium", "--config")
    command: list[str | Path] = [program, *options, ROOT / ".github/zizmor.yml", file]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_is_without_a_finding(file: Path) -> None:
    done = zizmor(file)
    assert done.returncode == 0, done.stdout


def test_a_workflow_that_runs_what_a_stranger_wrote_is_found(tmp_path: Path) -> None:
    file = tmp_path / "ci.yml"
    file.write_text(WORKFLOWS[0].read_text().replace("make lint types", "echo ${{ github.event.issue.title }}"))
    assert "template-injection" in zizmor(file).stdout


def test_workflows_have_no_more_rights_than_they_need() -> None:
    """Read only, but for the jobs that publish; each action at a version; no event that gives a fork our secrets."""
    assert {file.stem for file in WORKFLOWS} == {"ci", "release"}
    writing: dict[str, dict[str, str]] = {}
    for file in WORKFLOWS:
        flow = yaml.load(file.read_text(), yaml.BaseLoader)
        assert flow["permissions"] == {"contents": "read"}, file.name
        assert "pull_request_target" not in flow["on"]
        for name, job in flow["jobs"].items():
            rights = job.get("permissions", {})
            writing |= {f"{file.stem}/{name}": rights} if "write" in rights.values() else {}
            assert "timeout-minutes" in job or "uses" in job, f"{file.name}: {name} may hang for six hours"
            for step in job.get("steps", ()):
                if "uses" in step:
                    assert re.fullmatch(r"[\w-]+/[\w/-]+@(v\d+(\.\d+)*|release/v1)", step["uses"]), step["uses"]
                if step.get("uses", "").startswith("actions/checkout@"):
                    assert step["with"]["persist-credentials"] == "false", name
                assert "${{ github.event" not in step.get("run", ""), "what strangers write is no part of a script"
    assert writing == {
        "release/image": {"contents": "read", "packages": "write"},
        "release/publish": {"id-token": "write"},
        "release/notes": {"contents": "write"},
    }


def test_what_workflows_run_exists() -> None:
    """Targets of make, and scripts that a shell takes."""
    makefile = (ROOT / "Makefile").read_text()
    targets = {one for line in re.findall(r"^([a-z][a-z -]*):", makefile, re.MULTILINE) for one in line.split()}
    scripts = [
        step["run"]
        for file in WORKFLOWS
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job.get("steps", ())
        if "run" in step
    ]
    made = re.findall(r"\bmake ([a-z -]+)", "\n".join(scripts))
    used = {target for targets_of_one in made for target in targets_of_one.split()}
    assert {"test", "wheels-check", "wheels-test", "sbom"} <= used <= targets
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=60)


def test_cibuildwheel_builds_what_lbproxy_runs_on() -> None:
    """For every Python from the oldest that is allowed, compiled or not at all."""
    settings = PROJECT["tool"]["cibuildwheel"]
    oldest = int(PROJECT["project"]["requires-python"].removeprefix(">=3."))
    minors = [int(one) for one in re.findall(r"cp3(\d+)-", settings["build"])]
    assert minors == list(range(oldest, max(minors) + 1))
    said = re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert {*map(int, said)} <= {*minors}
    assert settings["environment"]["LBPROXY_COMPILED"] == "1"
    assert "-g0" in settings["environment"]["CFLAGS"]
