# SPDX-License-Identifier: Apache-2.0
"""Files beside the settings that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lbproxy.config.sections.access import AuthSettings
from lbproxy.config.text import ConfigError
from lbproxy.control.admin.key_files import read_keys


def test_a_relative_path_says_what_it_is_relative_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as relative:
        read_keys(AuthSettings(file="keys"))
    where = f"in {tmp_path}, lbproxy's working directory"
    assert relative.value.problems == (f"auth.file: keys: no such file or directory {where}",)
    absolute = str(tmp_path / "keys")
    with pytest.raises(ConfigError) as full:
        read_keys(AuthSettings(file=absolute))
    assert full.value.problems == (f"auth.file: {absolute}: no such file or directory",)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    """As editors on Windows write it."""
    text = f"alice: {'k' * 32}\n"
    (tmp_path / "plain").write_text(text, "utf-8")
    (tmp_path / "marked").write_text(text, "utf-8-sig")
    plain, marked = (read_keys(AuthSettings(file=str(tmp_path / name))) for name in ("plain", "marked"))
    assert marked == plain
    assert len(plain) == 1
