# SPDX-License-Identifier: Apache-2.0
"""Pieces of saved data as lines of JSON, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import orjson

from lbproxy.core.saved.pieces import Piece
from lbproxy.core.saved.reading import Reader, Saved, SavedError

MAX_LINE_BYTES: Final = 1 << 20
"""Lines are shorter than 100 KB, unless an endpoint has a thousand adapters with long names."""


def encode(piece: Piece) -> bytes:
    return orjson.dumps(piece, option=orjson.OPT_APPEND_NEWLINE)


def read_lines(lines: Iterable[bytes]) -> Saved:
    """Validate data. Raises SavedError."""
    reader = Reader()
    for line in lines:
        if len(line) > MAX_LINE_BYTES:
            raise SavedError("a line is too long")
        try:
            piece = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise SavedError("it is damaged, or not a state file of lbproxy") from None
        reader.take(piece)
    return reader.done()
