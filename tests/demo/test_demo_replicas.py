# SPDX-License-Identifier: Apache-2.0
"""`lbproxy demo --replicas`: what it refuses, its addresses and settings, and the leash of another program."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lbproxy.commands.cli import main
from lbproxy.config.parse import parse
from lbproxy.demo import replicas
from lbproxy.demo.fleet import FleetError, Program
from lbproxy.demo.replicas import PROGRAMS, STORE_STARTS, Replica, ReplicasOptions, StartedReplicas, leaves, settings
from lbproxy.extras.installing import needs
from tests.support.ports import free_port

LEASH = [sys.executable, "-m", "lbproxy.demo.leash", "--"]


def test_each_replica_has_the_next_port() -> None:
    found = ReplicasOptions(replicas=3, listen="[::1]:8080", admin="localhost:9901").addresses()
    assert found == [
        ("[::1]:8080", "localhost:9901"),
        ("[::1]:8081", "localhost:9902"),
        ("[::1]:8082", "localhost:9903"),
    ]
    free = ReplicasOptions(replicas=2, listen="127.0.0.1:0", admin="127.0.0.1:0").addresses()
    assert free == [("127.0.0.1:0", "127.0.0.1:0")] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--traffic"], "--replicas cannot be used with --traffic"),
        (["--workers", "2"], "--replicas cannot be used with --workers"),
        (["--listen", "127.0.0.1:65535"], "--listen: 2 replicas need as many ports, from 65535 on"),
        (["--listen", "127.0.0.1:9900"], "--listen and --admin must be 2 ports apart"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--replicas", "2", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", ["0", "1", "5"])
def test_two_to_four(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", "--replicas", number])
    assert end.value.code == 2
    assert "choose from 2, 3, 4" in capsys.readouterr().err.replace("'", "")


def test_without_a_server_program_it_says_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["demo", "--replicas", "2"]) == 2
    assert capsys.readouterr().err == (
        "lbproxy demo: --replicas needs redis-server or valkey-server on PATH, "
        "from a package such as redis-server, redis or valkey\n"
    )


def test_without_the_extra_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    assert main(["demo", "--replicas", "2"]) == 2
    assert capsys.readouterr().err == f"lbproxy demo: --replicas {needs('replicas')}\n"


def test_replicas_have_the_same_endpoints_and_names_of_their_own() -> None:
    running = StartedReplicas(Program("redis-server"), 6380, [Replica(Program("lb-1")), Replica(Program("lb-2"))])
    options = ReplicasOptions(replicas=2, listen="127.0.0.1:8080", admin="127.0.0.1:9901")
    texts = settings(options, running, ["http://127.0.0.1:8001", "http://127.0.0.1:8002"])
    first, second = (parse(text, environ={}, source="demo") for text in texts)
    assert [one.replicas.name for one in (first, second)] == ["lb-1", "lb-2"]
    for one in (first, second):
        assert one.replicas.url is not None
        assert one.replicas.url.get_secret_value() == "redis://127.0.0.1:6380/0"
    assert first.endpoints == second.endpoints
    assert len(first.endpoints) == 2


def test_every_error_of_nested_groups_is_found() -> None:
    one, two = FleetError("one"), FleetError("two")
    group = BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [one]), two])
    assert leaves(group) == [one, two]


def test_another_program_keeps_the_process_id_and_ends_with_standard_input() -> None:
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen(
        [*LEASH, sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.stdin.close()
        assert process.wait(30) == -signal.SIGKILL


def test_a_program_that_ends_closes_what_it_inherited() -> None:
    """The child that holds the leash outlives it, and must not keep its output open: uvloop leaves copies of that."""
    read, write = os.pipe()
    with subprocess.Popen([*LEASH, "true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[write]) as process:
        os.close(write)
        assert process.stdout is not None
        assert process.wait(30) == 0
        assert process.stdout.read() == b""
        assert os.read(read, 1) == b""
        os.close(read)


@pytest.mark.parametrize("taken", [1, STORE_STARTS])
def test_a_port_that_another_program_takes_meanwhile_costs_another_one(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (found := [path for name in PROGRAMS if (path := shutil.which(name))]):
        pytest.skip(f"NOT TESTED here: neither of {PROGRAMS} (make test-tools)")

    async def started() -> int:
        running = StartedReplicas(Program("store"))
        async with asyncio.TaskGroup() as tasks:
            try:
                await replicas._start_store(running, found[0], tmp_path, tasks)
            finally:
                await running.store.end()
        return running.store_port

    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [other.getsockname()[1]] * taken + [free := free_port()]
        monkeypatch.setattr(replicas, "_free_port", lambda: ports.pop(0))
        if taken < STORE_STARTS:
            assert asyncio.run(started()) == free
        else:
            with pytest.raises(ExceptionGroup) as group:
                asyncio.run(started())
            assert group.group_contains(FleetError, match="Address already in use")
            assert ports == [free]
