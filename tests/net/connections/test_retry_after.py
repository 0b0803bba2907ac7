# SPDX-License-Identifier: Apache-2.0
"""Retry-After as servers write it, and as they should not."""

from __future__ import annotations

import pytest

from lbproxy.proxy.exchange.failures import retry_after_s

DATE = "Date: Thu, 26 Nov 2026 01:00:00 GMT\r\n"


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ("Retry-After: 7\r\n", 7.0),
        ("x: y\r\nretry-after:  0.5 \r\n", 0.5),
        (f"{DATE}Retry-After: Thu, 26 Nov 2026 01:02:00 GMT\r\n", 120.0),
        (f"Retry-After: Thu, 26 Nov 2026 01:02:00 GMT\r\n{DATE}", 120.0),
        ("Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n", None),
        *((f"Retry-After: {value}\r\n", None) for value in ("0", "-5", "soon", "", "1e9", "nan", "inf", "9" * 40)),
        ("Retry-After: Thu, 99 Nov 2026 01:02:00 GMT\r\n", None),
        ("x-retry-after: 7\r\n", None),
        ("", None),
    ],
)
def test_what_is_asked_for(fields: str, seconds: float | None) -> None:
    assert retry_after_s(fields.encode()) == seconds


def test_a_date_without_another_is_compared_with_the_clock() -> None:
    asked = retry_after_s(b"Retry-After: Thu, 01 Jan 2099 00:00:00 GMT\r\n")
    assert asked is not None
    assert asked > 3600.0
