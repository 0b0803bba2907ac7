# SPDX-License-Identifier: Apache-2.0
"""The token that lbproxy makes for itself: where it lies, who can read it, and what may not stand in its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lbproxy.control.admin.made_token import MadeToken, dashboard_link, file_name, folders, read_token

PORT = 9901
NAME = "lbproxy-9901.token"


def made(*wanted: Path) -> MadeToken:
    token = MadeToken([str(one) for one in wanted])
    token.make(PORT)
    return token


def test_the_best_folder_comes_first_and_relative_ones_are_none() -> None:
    environ = {"RUNTIME_DIRECTORY": "/run/lbproxy:/run/other", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert folders(environ, "/var/lib/lbproxy/state") == ["/run/lbproxy", "/run/user/7", "/var/lib/lbproxy"]
    assert folders({"XDG_RUNTIME_DIR": "run", "RUNTIME_DIRECTORY": ""}, None) == []
    assert folders({}, "state") == [os.getcwd()]


def test_the_first_folder_that_takes_it_has_it_for_its_user_alone(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    before = os.umask(0)
    try:
        token = made(tmp_path / "missing", good, tmp_path)
    finally:
        os.umask(before)
    assert file_name(PORT) == NAME
    assert token.path == str(good / NAME)
    assert (good / NAME).stat().st_mode & 0o777 == 0o600
    assert read_token(token.path) == token.text
    assert os.listdir(good) == [NAME], "nothing is left beside it"
    token.remove()
    assert [token.path, token.text, *os.listdir(good)] == [None, None]


def test_without_a_folder_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    token = made(tmp_path / "file", tmp_path / "missing")
    assert (token.path, token.text) == (None, None)
    token.remove()


def test_what_is_in_its_place_is_replaced_and_no_link_is_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / NAME).symlink_to(precious)
    token = made(folder)
    assert not (folder / NAME).is_symlink()
    assert precious.read_text() == "precious"
    assert read_token(str(folder / NAME)) == token.text


def test_the_token_of_a_process_that_lives_goes_on_and_its_end_leaves_the_file(tmp_path: Path) -> None:
    """A restart by SIGUSR2: both accept for a while, and who has read the file before is right with both."""
    old = made(tmp_path)
    new = made(tmp_path)
    assert new.text == old.text
    old.remove()
    assert read_token(str(tmp_path / NAME)) == new.text
    new.remove()
    assert not os.listdir(tmp_path)


def test_the_token_of_a_process_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    """Others may have listened on its port meanwhile, and been sent it."""
    left = "x" * 43
    (tmp_path / NAME).write_text(left)
    (tmp_path / NAME).chmod(0o600)
    assert read_token(str(tmp_path / NAME)) == left
    assert made(tmp_path).text != left


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o700, 0o400, 0o602])
def test_what_others_could_have_written_or_read_is_no_token(tmp_path: Path, mode: int) -> None:
    token = made(tmp_path)
    os.chmod(tmp_path / NAME, mode)
    with pytest.raises(OSError, match="mode"):
        read_token(str(tmp_path / NAME))
    token.remove()


def test_links_pipes_folders_and_other_texts_are_no_token(tmp_path: Path) -> None:
    token = made(tmp_path)
    assert token.path is not None
    (tmp_path / "link").symlink_to(tmp_path / NAME)
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o600)
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----")
    (tmp_path / "key").chmod(0o600)
    for name in ("link", "pipe", "folder", "key", "missing"):
        with pytest.raises(OSError):
            read_token(str(tmp_path / name))


def test_a_link_has_the_token_after_the_hash_where_no_server_sees_it() -> None:
    assert dashboard_link("http://a:1", "a+b") == "http://a:1/dashboard#token=a%2Bb"
    assert dashboard_link("http://a:1", None) == "http://a:1/dashboard"
