# SPDX-License-Identifier: Apache-2.0
"""What `lbproxy demo` says of its options, and of an address that somebody else has."""

from __future__ import annotations

import socket
import subprocess

import pytest

from lbproxy.commands.cli import main
from lbproxy.demo.taken import in_options
from lbproxy.demo.timeline import Verb, bad_night, names
from lbproxy.demo.traffic import SERVERS
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


def test_other_troubles_stay_as_they_are() -> None:
    assert in_options("cannot listen on a:1 (metrics): no") == "cannot listen on a:1 (metrics): no"
    assert in_options("x\ny: cannot listen on a:1 (admin): no\nz") == (
        "x\ny: cannot listen on a:1: no; say another: lbproxy demo --admin HOST:PORT\nz"
    )


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
    assert (
        f"cannot listen on {where}: address already in use; say another: lbproxy demo {option} HOST:PORT" in done.stderr
    )


@pytest.mark.parametrize("other", [["--traffic"], ["--replicas", "2"]])
def test_prefill_and_decode_apart_have_a_demo_of_their_own(
    other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--disaggregated", *other]) == 1
    assert f"--disaggregated cannot be used with {other[0]}" in capsys.readouterr().err
