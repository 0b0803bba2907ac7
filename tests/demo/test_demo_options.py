# SPDX-License-Identifier: Apache-2.0
"""What `lbproxy demo` says of its options, and of an address that somebody else has."""

from __future__ import annotations

import re
import socket
import subprocess
from contextlib import ExitStack

import pytest

from lbproxy.commands.cli import main
from lbproxy.demo.taken import find_taken
from lbproxy.demo.timeline import Verb, bad_night, names
from lbproxy.demo.traffic import SERVERS
from tests.support.aio import run
from tests.support.process import LBPROXY


def test_help_says_how_many_are_drained(capsys: pytest.CaptureFixture[str]) -> None:
    """Two of six: a third of the fleet, not a third server."""
    acts = [act for step in bad_night(names(SERVERS)).steps for act in step.acts]
    assert [len(act.servers) for act in acts if act.verb is Verb.DRAIN] == [2]
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "two are drained" in said
    assert "HOST:PORT or http://HOST:PORT (default: 127.0.0.1:9901)" in said


def taken_port(stack: ExitStack) -> str:
    return f"127.0.0.1:{stack.enter_context(socket.create_server(('127.0.0.1', 0))).getsockname()[1]}"


def test_all_addresses_that_are_taken_are_named_at_once_with_a_command_that_works() -> None:
    """Who obeys must not be refused a second time."""
    with ExitStack() as stack:
        listen, admin = taken_port(stack), taken_port(stack)
        arguments = ["demo", "--workers", "2", f"--listen={listen}"]
        first, second, command = (run(find_taken(listen, admin, arguments)) or "").splitlines()
        assert first == f"cannot listen on {listen} (--listen): address already in use"
        assert second == f"cannot listen on {admin} (--admin): address already in use"
        found = re.fullmatch(
            r"this would work: lbproxy demo --workers 2 --listen (127.0.0.1:\d+) --admin (127.0.0.1:\d+)", command
        )
        assert found is not None
        assert found[1] != found[2]
        assert run(find_taken(found[1], found[2], ["demo"])) is None


def test_what_is_free_stays_and_replicas_need_as_many_ports() -> None:
    with ExitStack() as stack:
        taken = taken_port(stack)
        port = int(taken.rpartition(":")[2])
        admin = f"127.0.0.1:{port - 3}"
        said = run(find_taken(f"127.0.0.1:{port - 1}", "127.0.0.1:0", ["demo", "--admin", admin], count=2)) or ""
        assert said.startswith("cannot listen on 127.0.0.1:")
        assert f"demo --admin {admin} --listen 127.0.0.1:" in said


def test_an_address_that_no_port_helps_gets_no_command() -> None:
    assert "work" not in (run(find_taken("192.0.2.1:8080", "127.0.0.1:0", ["demo"])) or "")


@pytest.mark.parametrize(("option", "traffic"), [("--listen", []), ("--admin", []), ("--admin", ["--traffic"])])
def test_a_taken_port_leads_to_the_option_of_the_demo(option: str, traffic: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        ports = {"--listen": "127.0.0.1:0", "--admin": "http://127.0.0.1:0"} | {option: where}
        arguments = [word for pair in ports.items() for word in pair]
        done = subprocess.run(
            [*LBPROXY, "demo", *traffic, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    assert f"cannot listen on {where} ({option}): address already in use\nthis would work: " in done.stderr


@pytest.mark.parametrize("other", [["--traffic"], ["--replicas", "2"]])
def test_prefill_and_decode_apart_have_a_demo_of_their_own(
    other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--disaggregated", *other]) == 1
    assert f"--disaggregated cannot be used with {other[0]}" in capsys.readouterr().err
