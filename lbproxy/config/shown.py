# SPDX-License-Identifier: Apache-2.0
"""What may be shown of a text that can have a secret in it: a URL, right or wrong, in an error, a log or on a page."""

from __future__ import annotations

import re

_STARS = "***"
_USER_INFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://|unix:)?.*@", re.DOTALL)
_OPTIONS = re.compile(r"([?#]).*", re.DOTALL)
_NO_PORT = re.compile(r"(://[^/:\[\]]*:)(?![0-9]{1,5}(?:/|\?|#|$))[^/?#]*")


def without_values(url: str) -> str:
    """A URL without its values: no user, password, query or fragment, nor what stands where a port belongs.

    Of a text that is none, what could be one of these is left out as well.
    """
    text = _USER_INFO.sub(lambda match: f"{match[1] or ''}{_STARS}@", url, count=1)
    text = _NO_PORT.sub(rf"\g<1>{_STARS}", text, count=1)
    return _OPTIONS.sub(rf"\g<1>{_STARS}", text, count=1)


def without_path(url: str) -> str:
    """The scheme and host of a URL: of a webhook the path is its secret."""
    start = re.match(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#@]*", url)
    return _STARS if start is None else f"{start[0]}/{_STARS}"


def without_parts_of(text: str, url: str) -> str:
    """A text, such as an error of a library, without the values that stand in `url`, but for words as short as the
    text's own.
    """
    parts = set(re.split(r"[:/@?&=#,]|%[0-9A-Fa-f]{2}", url.partition("://")[2]))
    shown = set(re.split(r"[:/?#,]", without_values(url)))
    for part in sorted(parts - shown, key=len, reverse=True):
        if len(part) >= 6:
            text = text.replace(part, _STARS)
    return text
