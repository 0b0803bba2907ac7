# SPDX-License-Identifier: Apache-2.0
"""What differs between two trees of settings, as lines that a user reads: nothing secret is in them.

Sections that have names (endpoints, API keys, flows) are compared by these, not by their place in a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from lbproxy.config.parse import without_secrets
from lbproxy.config.section import Section
from lbproxy.config.text import is_secret, join, one_line
from lbproxy.config.tree import Settings

MAX_CHANGES: Final = 200
"""Changes that are listed: a file may have a thousand endpoints."""


class ReloadResult(NamedTuple):
    """What became of a reload."""

    problems: list[str]
    """Why the settings are refused; none: they are in force."""
    changed: list[str]
    """What is other than before: see `changes`."""
    at_next_start: list[str]
    """The keys that the file changed, and a reload does not."""


def changes(before: Settings, after: Settings) -> list[str]:
    """Such as `routing.policy: random, was adaptive` and `endpoints.gpu-3 is new`, in the order of the settings; the
    first `MAX_CHANGES`.
    """
    found = _differences("", before, after, without_secrets(before), without_secrets(after))
    return list(islice(found, MAX_CHANGES))


def _differences(path: str, old: object, new: object, shown_old: object, shown_new: object) -> Iterator[str]:
    """`shown_...`: the same two parts, as JSON can say them without secrets."""
    parts_old, parts_new = _parts(old, shown_old), _parts(new, shown_new)
    if parts_old is not None and parts_new is not None:
        for name, (part, shown) in parts_new.items():
            below = join(path, name)
            if name in parts_old:
                was, shown_was = parts_old[name]
                yield from _differences(below, was, part, shown_was, shown)
            else:
                yield f"{below} is new"
        yield from (f"{join(path, name)} is gone" for name in parts_old if name not in parts_new)
    elif old != new:
        texts = _text(shown_new), _text(shown_old)
        is_shown = texts[0] != texts[1] and "***" not in "".join(texts) and not is_secret(path)
        yield f"{path}: {texts[0]}, was {texts[1]}" if is_shown else f"{path} is another"


def _parts(value: object, shown: object) -> dict[str, tuple[object, object]] | None:
    """What a section, or a collection of sections with names, consists of; None: it is no such thing."""
    if isinstance(value, Section) and isinstance(shown, dict):
        keys = {name: field.alias or name for name, field in type(value).model_fields.items()}
        return {key: (getattr(value, name), shown[key]) for name, key in keys.items()}
    if isinstance(value, dict) and isinstance(shown, dict) and all(map(_is_section, value.values())):
        return {name: (part, shown[name]) for name, part in value.items()}
    if isinstance(value, tuple) and isinstance(shown, list) and all(hasattr(one, "name") for one in value):
        named = {one.name: (one, part) for one, part in zip(value, shown, strict=True)}
        return named if len(named) == len(value) else None
    return None


def _is_section(value: object) -> bool:
    return isinstance(value, Section)


def _text(shown: object) -> str:
    if isinstance(shown, dict):
        return "a mapping"
    return one_line(shown if isinstance(shown, str) else json.dumps(shown))
