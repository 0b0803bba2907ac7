# SPDX-License-Identifier: Apache-2.0
"""`lbproxy usage`: of what runs, after a kill -9, and where nothing keeps it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from lbproxy.commands.cli import main
from lbproxy.control.saving.state_file import read
from lbproxy.control.saving.usage_file import rows_of
from tests.support.process import lbproxy, mock

BODY = {"model": "m", "prompt": "x " * 100, "max_tokens": 5, "ignore_eos": True}


@pytest.mark.parametrize("workers", ["", "workers: 2\n"])
def test_tokens_by_day_also_after_a_kill(tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    file = tmp_path / "kept"
    more = f"{workers}state: {{file: {file}, interval: 1s}}\n"

    def used(*arguments: str) -> dict[str, object]:
        assert main(["usage", "--json", *arguments]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["kept"]
        (row,) = found["rows"]
        return dict(row)

    with mock("--model", "m") as (_, url), lbproxy(tmp_path, [url], more) as (process, listen, admin):
        process.wait_for("serves m")
        for _n in range(3):
            headers = {"x-lbproxy-flow": "team"}
            usage = httpx.post(f"{listen}/v1/completions", json=BODY, headers=headers, timeout=60).json()["usage"]
        row = used("--admin", admin)
        prompt = int(str(row["prompt_uncached"])) + int(str(row["prompt_cached"]))
        assert (row["flow"], row["model"], row["estimated"]) == ("team", "m", 0)
        assert (prompt, row["completion"]) == (3 * usage["prompt_tokens"], 15)
        end = time.monotonic() + 60
        while not (file.exists() and rows_of(read(str(file)).tokens.values(), 9) == [row]):
            assert time.monotonic() < end
            time.sleep(0.1)
        process.kill()
    settings = tmp_path / "left.yaml"
    settings.write_text(f"endpoints: ['http://127.0.0.1:9']\nstate: {{file: {file}}}\n")
    assert used("--config", str(settings)) == row


def test_where_nothing_keeps_it_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lbproxy(tmp_path, ["http://127.0.0.1:9"]) as (_, _listen, admin):
        assert main(["usage", "--admin", admin]) == 0
        said = capsys.readouterr().out
        assert "no tokens were used" in said
        assert "without `state.file`" in said
    settings = tmp_path / "left.yaml"
    settings.write_text("endpoints: ['http://127.0.0.1:9']\n")
    assert main(["usage", "--config", str(settings)]) == 1
    assert "state.file" in capsys.readouterr().err
