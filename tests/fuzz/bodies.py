# SPDX-License-Identifier: Apache-2.0
"""JSON bodies: the `model` that `requests.openai` sees against the one that json.loads, as servers use it, sees."""

from __future__ import annotations

import json
import random

from lbproxy.core.requests.openai import MAX_MODEL_CHARS, place_for_name, read_json_body
from lbproxy.core.requests.outcome import LbError
from tests.fuzz.oracle import DifferenceError
from tests.fuzz.strictness import explain

NAME = "bodies"
SEEDS = [
    b'{"model":"a","messages":[{"role":"user","content":"hi \\"there\\""}],"stream":true,"max_tokens":7}',
    b'{"model":"first","model":"last","x":{"model":"inner"}}',
    b' \n{"m\\u006fdel" : "esc\\u00e9d" , "temperature" : NaN, "x":[Infinity,-Infinity,1e400]}\r\n',
    '{"model":"\u00e9\u20ac","prompt":"\U0001f600 \u2028","n":-0.5e-3}'.encode(),
    b'\xef\xbb\xbf{"model":"bom"}',
    '{"model":"wide","x":1}'.encode("utf-16"),
    '{"model":"wider"}'.encode("utf-32-be"),
    b'{"prompt":[1,2,3],"cache_salt":"s","max_completion_tokens":3,"max_tokens":12345678901234567890}',
    b'{"model":"lone","x":"\\ud800","y":"\\ud83d\\ude00","z":"\xed\xa0\x80"}',
    b"[" * 60 + b"]" * 60,
    b'{"model":null,"model":"x","model":1,"stream":false}',
    b"{}",
]
TOKENS = [
    *(
        b'"model"',
        b'"model":"x"',
        b',"model":"y"',
        b'"m\\u006fdel":"z"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
    ),
    *(b"\\u0000", b"\\ud800", b"\\udc00", b"\\u0022", b'\\"', b"\\\\", b"null", b"true", b"NaN", b"Infinity", b"-"),
    *(b"1e999", b"0", b"01", b"1" * 400, b"1" * 5000, b"\xef\xbb\xbf", b"\x00", b"\xff", b"\xc3", b" ", b"\n", b"\x0c"),
    *(b"[" * 1100, b'{"a":' * 1000, b"//x\n", b"'", b"\xc2\xa0", b"\xf0\x9f\x98\x80", b"stream", b"max_tokens"),
]


def usable(model: object) -> bool:
    """A name that lbproxy takes, in other words than its own."""
    return isinstance(model, str) and 1 <= len(model) <= MAX_MODEL_CHARS and all(char.isprintable() for char in model)


def check(data: bytes, _: random.Random) -> str:
    """See the module."""
    try:
        theirs = json.loads(data)
        refused = not isinstance(theirs, dict)
    except (ValueError, RecursionError):
        theirs, refused = None, True
    try:
        ours = read_json_body(data)
    except LbError as error:
        if refused:
            return "refused by both"
        if "model" in theirs and not usable(theirs["model"]):
            return "a model that is no name"
        rule = explain(NAME, data)
        if rule is None:
            raise DifferenceError(f"refused: {error.message}; json reads {str(theirs)[:200]}") from None
        return rule
    if refused:
        rule = explain(NAME, data, laxer=True)
        if rule is None:
            raise DifferenceError(f"we read model {ours.model!r}, json refuses")
        return rule
    if ours.model != theirs.get("model"):
        raise DifferenceError(f"we read model {ours.model!r}, json {theirs.get('model')!r}")
    if ours.stream is not (theirs.get("stream") is True):
        raise DifferenceError("stream is read otherwise")
    if "model" not in theirs:
        named = json.loads(b"".join(place_for_name(data).named(data, 'q"\\\u00e9')))
        if named != {**theirs, "model": 'q"\\\u00e9'} and repr(named.get("model")) != repr('q"\\\u00e9'):
            raise DifferenceError("the model that was put in is read otherwise")
        if repr({**theirs, "model": ""}) != repr({**{k: v for k, v in named.items() if k != "model"}, "model": ""}):
            raise DifferenceError("a body is changed by more than its model")
    return "read alike"
