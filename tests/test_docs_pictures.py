# SPDX-License-Identifier: Apache-2.0
"""The pictures in docs/ are of this version, and name things as its dashboard does; `make pictures` takes them."""

from __future__ import annotations

import pytest
from PIL import Image

from lbproxy import __version__
from tests.support.docs import DOCS, PAGES
from tests.support.pictures import shown

PICTURES = sorted((DOCS / "images").iterdir())


@pytest.mark.parametrize("picture", [one.name for one in PICTURES])
def test_a_picture_shows_what_there_is(picture: str) -> None:
    with Image.open(DOCS / "images" / picture) as image:
        if picture.endswith(".gif"):
            assert image.info["comment"] == f"lbproxy {__version__}".encode()
        else:
            assert {key: image.info.get(key) for key in shown()} == shown()


def test_each_picture_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [one.name for one in PICTURES if f"images/{one.name})" not in text] == []


def test_the_words_are_those_of_the_page() -> None:
    """Of its titles, heads of columns and values some are looked for, so that no empty list is compared."""
    assert {"Endpoints up", "First byte of streams", "KV cache", "outcome", "bytes per prompt token"} <= {
        *shown()["Comment"].split("; ")
    }
