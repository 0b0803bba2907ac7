# SPDX-License-Identifier: Apache-2.0
"""Settings files: `config.parse` gives settings, the same twice, or ConfigError and nothing else, whatever the text."""

from __future__ import annotations

import random

from lbproxy.config.parse import parse
from lbproxy.config.text import ConfigError
from tests.fuzz.oracle import DifferenceError

NAME = "settings"
SEEDS = [
    b"endpoints:\n  - http://10.0.0.1:8000\n",
    b"listen: 0.0.0.0:8080\nendpoints:\n  - {url: 'http://a:1', name: a, weight: 2, engine: vllm}\n",
    b"timeouts: {connect: 1s, first_byte: 10m}\nlimits: {json_body: 32MiB, connections: 100}\nendpoints: [http://a]\n",
    b"routing:\n  policy: adaptive\nadmission: {queue_requests: 0, order: fcfs}\nendpoints: ['dns+http://x:1']\n",
    b"health: {interval: 500ms, fall: 3}\nbreaker: {panic: false}\nretry: {attempts: 2}\nendpoints: [http://${H:-h}]\n",
    b"engines:\n  mine:\n    waiting: [q]\n    running: r\nendpoints: [{url: 'http://a', engine: mine}]\n",
]
TOKENS = [
    *(
        b"endpoints:",
        b"listen:",
        b"routing:",
        b"- ",
        b": ",
        b"{",
        b"}",
        b"[",
        b"]",
        b"\n",
        b"  ",
        b"\t",
        b"#",
        b"'",
        b'"',
    ),
    *(
        b"&a ",
        b"*a",
        b"!!python/object:os.system ",
        b"!!int ",
        b"---\n",
        b"...\n",
        b"%YAML 9.9\n",
        b"|\n",
        b">-\n",
        b"? ",
    ),
    *(b"null", b"true", b"on", b"010", b"0x1F", b".inf", b".nan", b"1e999", b"-1", b"99999999999999999999", b"1:30"),
    *(
        b"10s",
        b"1KiB",
        b"2024-01-01",
        b"http://[::1]:80",
        b"http://u:p@h/",
        b"file:///x",
        b"${H}",
        b"${H",
        b"$${",
        b"\\U",
    ),
    *(
        b'"\\UFFFFFFFF"',
        b"\x00",
        b"\xff",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"\xef\xbb\xbf",
        b"=",
        b"<<: ",
        b"[" * 40,
        b"~",
    ),
]
ENVIRON = {"H": "host", "EMPTY": "", "BAD": "a: b\n- c"}


def check(data: bytes, _: random.Random) -> str:
    """See the module."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        settings = parse(text, environ=ENVIRON)
    except ConfigError as error:
        if not error.problems or not all(map(str.isprintable, str(error).split("\n"))):
            raise DifferenceError(f"a problem that cannot be shown: {error.problems}") from None
        return "refused"
    if parse(text, environ=ENVIRON) != settings:
        raise DifferenceError("two readings differ")
    return "taken"
