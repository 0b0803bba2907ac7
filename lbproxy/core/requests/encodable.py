# SPDX-License-Identifier: Apache-2.0
"""What clients and endpoints send, such that UTF-8, msgpack and JSON can have it: it is told other processes, and
written down. Python's json reads lone surrogates and integers of any size.
"""

from __future__ import annotations

from typing import Final

import msgspec

_MIN_INTEGER: Final = -(1 << 63)
_MAX_INTEGER: Final = (1 << 64) - 1


def encodable_text(text: str) -> str:
    """The same, with lone surrogates as escapes, so that texts that differ still do."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def encodable(value: object) -> object:
    """The same with such texts, and integers within 64 bits. For values, lists, dictionaries and Structs of them."""
    if isinstance(value, str):
        return encodable_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return max(_MIN_INTEGER, min(value, _MAX_INTEGER))
    if isinstance(value, msgspec.Struct):
        return type(value)(*(encodable(getattr(value, field)) for field in value.__struct_fields__))
    if isinstance(value, (tuple, list)):
        return [encodable(one) for one in value]
    if isinstance(value, dict):
        return {encodable(key): encodable(one) for key, one in value.items()}
    return value
