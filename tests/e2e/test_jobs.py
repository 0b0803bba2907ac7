# SPDX-License-Identifier: Apache-2.0
"""The pages that begin with a job: the settings of each are run before simulated servers, and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.docs import DOCS, Block, all_blocks, blocks
from tests.support.process import Process, mock

JOBS = [block for block in all_blocks() if block.mark == "job"]
KEYS = {name: f"{number:032x}" for number, name in enumerate(("ANN_KEY", "NIGHTLY_KEY", "LBPROXY_KEY"), 1)}
MODELS = {"agents-at-home.md": "qwen3-coder"}
"""Of a page's servers, where it is not the others'."""


def test_each_page_of_a_job_is_short_and_has_one_command() -> None:
    first = (DOCS / "README.md").read_text().partition("**Set it up**")[0]
    pages = re.findall(r"\]\(([\w-]+\.md)\)", first)
    assert len(pages) >= 5
    assert sorted(block.page.name for block in JOBS) == sorted(pages)
    for page in pages:
        assert 150 <= len((DOCS / page).read_text().split()) <= 250, page


@pytest.mark.parametrize("block", JOBS, ids=lambda block: block.page.stem)
def test_the_job_is_done(block: Block, tmp_path: Path) -> None:
    page = blocks(block.page)
    settings = next(one for one in page if one.language == "yaml" and not one.mark).text
    shown = page[page.index(block) + 1].text
    with ExitStack() as stack:
        servers = set(re.findall(r"http://[a-z][\w-]*:8000", settings))
        assert len(servers) >= 2
        for server in servers:
            _, url = stack.enter_context(mock("--model", MODELS.get(block.page.name, "qwen3-32b")))
            settings = settings.replace(server, url)
        file = tmp_path / "cfg.yaml"
        free = re.sub("^listen: .*$", "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0", settings, flags=re.MULTILINE)
        file.write_text(free.replace("lbproxy.state", str(tmp_path / "state")))
        process = stack.enter_context(Process("--config", str(file), env=KEYS))
        listen = process.wait_for(r"listens on http://(\S+),")[1]
        script = block.text.replace("127.0.0.1:8080", listen)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd=tmp_path,
            env={**os.environ, **KEYS},
        )
    assert done.stdout == shown
