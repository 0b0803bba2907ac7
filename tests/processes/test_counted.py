# SPDX-License-Identifier: Apache-2.0
"""What a balancer process is told that the one before it counted of limits."""

from __future__ import annotations

import pytest

from lbproxy.core.capacity.allowance import Use
from lbproxy.core.saved.pieces import flow_piece
from lbproxy.core.saved.reading import encode
from lbproxy.processes.balancing import _counted

HEAD = {"kind": "head", "format": "lbproxy state", "version": 2, "saved_at": 1e9, "block_bytes": None}
END = {"kind": "end"}


def test_it_is_read() -> None:
    flow = flow_piece("ada", Use(5.0, 1.0, 2.0, None), 1e9)
    found = _counted(b"".join(map(encode, (HEAD, flow, END))))
    assert found is not None
    assert found.flows == {"ada": Use(1e9 + 5.0, 1.0, 2.0, None)}
    assert _counted(b"") is None


@pytest.mark.parametrize("lines", [b"{", b"[]", encode(HEAD), encode(HEAD) + b'{"kind":"flow"}\n' + encode(END)])
def test_what_cannot_be_read_is_an_error_in_the_log_and_no_end(lines: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The next balancer process would be told the same, and end too."""
    assert _counted(lines) is None
    assert "limits begin anew" in caplog.text
