# SPDX-License-Identifier: Apache-2.0
"""Ids of objects that live on one model server: files, batches, videos, conversations, fine-tuning jobs, whatever a
server will have tomorrow. A server that returned an id has its object; a request that names it must go there.

The APIs are not listed. What counts is where an id stands: in a response as `id`, or under a name that ends in
`file_id`; in a request in the path behind the name of a collection, or in the body under a name that ends in `_id`,
`_ids`, `_file` or `_files`, or is `conversation`. That a word is an id shows in its having a digit or a capital letter.
Texts that clients choose (`metadata`) are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import orjson

from lbproxy.core.requests.outline import is_light

MAX_BYTES: Final = 256 << 10
"""The largest response that is looked at: a page of a list with 100 objects has some 50 KB."""
MAX_IDS: Final = 1000
"""Ids of one response that are noted."""
MAX_VALUES: Final = 4096
"""Values of a request that are looked at: 0.3 ms."""
MAX_DEPTH: Final = 6
_ID: Final = re.compile(r"(?=[a-z_-]*[0-9A-Z])[A-Za-z0-9_-]{4,160}")
_REFERENCES = ("_id", "_ids", "_file", "_files")
_CLIENTS_OWN: Final = "metadata"
_CONVERSATION: Final = "conversation"


def is_object_id(text: str) -> bool:
    """Whether a text has the form of an id."""
    return _ID.fullmatch(text) is not None


def find_objects(body: bytes) -> list[str]:
    """The ids of objects that a response shows its server to have; at most `MAX_IDS`."""
    if not 2 < len(body) <= MAX_BYTES or not is_light(body):
        return []
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    shown = [said]
    if isinstance(said, dict) and isinstance(said.get("data"), list):
        shown += said["data"]
    found: dict[str, None] = {}
    for one in shown:
        for name, value in one.items() if isinstance(one, dict) else ():
            if name == "id" or name.endswith(("file_id", "_files")):
                found.update(dict.fromkeys(_ids(value)))
        if len(found) > MAX_IDS:
            break
    return list(found)[:MAX_IDS]


def _ids(value: object) -> Iterator[str]:
    for one in value if isinstance(value, list) else (value,):
        if isinstance(one, str) and is_object_id(one):
            yield one


def named_in_path(path: str) -> list[str]:
    """The ids in a path below /v1/, the outermost object first."""
    return [one for one in path.split("/")[3:] if is_object_id(one)]


def named_in_body(fields: Mapping[str, object]) -> Iterator[str]:
    """The ids in a request body, those of the outermost object first."""
    for name, value in _named_values(fields):
        if name == _CONVERSATION:
            yield from _ids(value.get("id") if isinstance(value, dict) else value)
        elif name.endswith(_REFERENCES):
            yield from _ids(value)


def refers(fields: Mapping[str, object], *endings: str) -> bool:
    """Whether a name in a request body ends so, as far as `named_in_body` looks."""
    return any(name.endswith(endings) for name, _ in _named_values(fields))


def _named_values(fields: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    level: list[object] = [fields]
    left = MAX_VALUES
    for _ in range(MAX_DEPTH):
        inner: list[object] = []
        for one in level:
            pairs = one.items() if isinstance(one, Mapping) else enumerate(one) if isinstance(one, list) else ()
            for name, value in pairs:
                left -= 1
                if left < 0:
                    return
                if name == _CLIENTS_OWN:
                    continue
                if isinstance(name, str):
                    yield name, value
                if isinstance(value, dict | list):
                    inner.append(value)
        level = inner
