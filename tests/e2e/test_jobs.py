# SPDX-License-Identifier: Apache-2.0
"""The pages that begin with a job: the settings of each are run before simulated servers, and print what it shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from lbproxy.config.parse import parse
from tests.support.docs import DOCS, Block, all_blocks, blocks
from tests.support.ports import free_port

JOBS = [block for block in all_blocks() if block.mark == "job"]


def test_each_page_of_a_job_is_short_and_has_one_command() -> None:
    """Short: its words, without settings and commands."""
    first = (DOCS / "README.md").read_text().partition("**Set it up**")[0]
    pages = re.findall(r"\]\(([\w-]+\.md)\)", first)
    assert len(pages) >= 5
    assert sorted(block.page.name for block in JOBS) == sorted(pages)
    for page in pages:
        words = re.sub("^```.*?^```$", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL).split()
        assert 100 <= len(words) <= 300, page


def free_ports(many: int) -> str:
    """Digits that, followed by 1 and so on, are ports at which nobody listens."""
    for number in count(1300 + os.getpid() % 1000):
        try:
            for last in range(1, many + 1):
                socket.create_server(("127.0.0.1", 10 * number + last)).close()
        except OSError:
            continue
        return str(number)
    raise AssertionError


@pytest.mark.parametrize("block", JOBS, ids=lambda block: block.page.stem)
def test_the_job_is_done_as_the_page_says_from_the_first_to_the_last_line(block: Block, tmp_path: Path) -> None:
    page = blocks(block.page)
    settings = next(one for one in page if one.language == "yaml" and not one.mark).text
    start = next(one for one in page if one.mark == "start").text
    shown = page[page.index(block) + 1].text
    servers = list(dict.fromkeys(re.findall(r"http://[a-z][\w-]*:8000", settings)))
    assert f"for n in {' '.join(str(n) for n, _ in enumerate(servers, 1))}; do lbproxy mock --port 800$n" in start
    assert len(servers) >= 2
    ports, listen, admin = free_ports(len(servers)), f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    for number, server in enumerate(servers, 1):
        settings = settings.replace(server, f"http://127.0.0.1:{ports}{number}")
    (tmp_path / "cfg.yaml").write_text(
        re.sub("^listen: .*$", f"listen: {listen}\nadmin: {admin}", settings, flags=re.MULTILINE)
    )
    script = f"{start}{block.text}".replace("800$n", f"{ports}$n").replace("sleep 1", "sleep 0.1")
    script = script.replace("127.0.0.1:8080", listen).replace("127.0.0.1:9901", admin)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p)' EXIT\n{script}"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-shown.count("\n") :] == shown.splitlines()


def test_the_settings_have_what_nginx_had() -> None:
    """Side by side, they must speak of the same servers, sizes and times."""
    page = blocks(DOCS / "replace-nginx.md")
    nginx = next(one.text for one in page if one.language == "nginx")
    ours = parse(next(one.text for one in page if one.language == "yaml"), environ={"ANN_KEY": "a0" * 16})
    servers = re.findall(r"server ([\w-]+:\d+)( backup)?;", nginx)
    assert [(one.name, one.tier) for one in ours.endpoints] == [(name, 2 if backup else 1) for name, backup in servers]
    (size,), (seconds,) = re.findall(r"max_body_size (\d+)m;", nginx), re.findall(r"read_timeout (\d+)s;", nginx)
    assert ours.limits.body == ours.limits.json_body == int(size) << 20
    assert ours.timeouts.first_byte == ours.timeouts.stream_idle == float(seconds)
    assert [one.name for one in ours.auth.keys] == re.findall(r"[0-9a-f]{32} (\w+);", nginx)
