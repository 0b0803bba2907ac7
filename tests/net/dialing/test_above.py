# SPDX-License-Identifier: Apache-2.0
"""An endpoint's own URLs in its responses: the way back to what the client asked for."""

from __future__ import annotations

import pytest

from lbproxy.net.dialing.above import REFERENCES, above, as_ours, below, may_name

HERE = "http://gpu-1:8000"
ADDRESS = "http://10.0.0.5:8000"
PROVIDER = "https://api.example.com:443/openai/v1"


@pytest.mark.parametrize(
    ("base_url", "line", "passes"),
    [
        (HERE, "Location: http://gpu-1:8000/v1/files/7?a=b&c#d", "Location: /v1/files/7?a=b&c#d"),
        (HERE, "location: HTTP://GPU-1:8000/v1/x", "location: /v1/x"),
        (HERE, "Location: https://gpu-1/v1/x", "Location: /v1/x"),
        (HERE, "Location: //gpu-1:8000/v1/x", "Location: /v1/x"),
        (HERE, "Location: http://user:secret@gpu-1:8000/v1/x", "Location: /v1/x"),
        (HERE, "Location: http://gpu-1.:8000/v1/x", "Location: /v1/x"),
        (HERE, "Location: http://gpu-1:8000", "Location: /"),
        (HERE, "Location: http://gpu-1:8000?x=1", "Location: /?x=1"),
        (HERE, "Location: http://gpu-1:8000//evil.example/", "Location: /evil.example/"),
        (HERE, "Location: /v1/files/7", "Location: /v1/files/7"),
        (HERE, "Location: files/7", "Location: files/7"),
        (HERE, "Location: https://cdn.example.com/file?sig=x", "Location: https://cdn.example.com/file?sig=x"),
        (HERE, "Location: http://gpu-10:8000/v1/x", "Location: http://gpu-10:8000/v1/x"),
        (HERE, "Location: http://localhost:8000/v1/x", "Location: /v1/x"),
        (HERE, "Location: http://127.0.0.1:8000/v1/x", "Location: /v1/x"),
        (HERE, "Location: http://[::1]:8000/v1/x", "Location: /v1/x"),
        (HERE, "Location: http://0.0.0.0:8000/v1/x", "Location: /v1/x"),
        (HERE, "Location: http:\\\\gpu-1:8000\\v1", ""),
        (HERE, "Location: https://cdn.example.com/?back=gpu-1:8000", ""),
        (HERE, "Content-Location: http://gpu-1:8000/v1/x", "Content-Location: /v1/x"),
        (HERE, "Operation-Location: http://gpu-1:8000/v1/x", "Operation-Location: /v1/x"),
        (HERE, "Refresh: 0; url=http://gpu-1:8000/v1/x", "Refresh: 0; url=/v1/x"),
        (HERE, 'Refresh: 0; url="http://gpu-1:8000/v1/x"', 'Refresh: 0; url="/v1/x"'),
        (
            HERE,
            'Link: <http://gpu-1:8000/v1/x>; rel="next", <https://docs.example.com/>; rel=help',
            'Link: </v1/x>; rel="next", <https://docs.example.com/>; rel=help',
        ),
        (HERE, "Server: gpu-1:8000", ""),
        (HERE, "Via: 1.1 gpu-1:8000 (nginx)", ""),
        (HERE, "X-Backend: http://gpu-1/", ""),
        (HERE, "X-Model: gpu-1", "X-Model: gpu-1"),
        (HERE, "X-Other: gpu-1:80001", "X-Other: gpu-1:80001"),
        (HERE, "X-Other: my-gpu-1:8000", "X-Other: my-gpu-1:8000"),
        (
            HERE,
            "Access-Control-Allow-Origin: http://localhost:3000",
            "Access-Control-Allow-Origin: http://localhost:3000",
        ),
        (ADDRESS, "X-Served-By: 10.0.0.5", ""),
        (ADDRESS, "X-Served-By: 10.0.0.51", "X-Served-By: 10.0.0.51"),
        (ADDRESS, "X-Version: 110.0.0.5", "X-Version: 110.0.0.5"),
        (ADDRESS, "Location: http://10.0.0.5:9000/v1/x", "Location: /v1/x"),
        ("http://[fd00::5]:8000", "Location: http://[FD00:0::5]:8000/v1/x", "Location: /v1/x"),
        ("http://[fd00::5]:8000", "X-Served-By: [fd00::5]:8000", ""),
        (PROVIDER, "Location: https://api.example.com/openai/v1/files/7", "Location: /v1/files/7"),
        (PROVIDER, "Location: /openai/v1/files/7", "Location: /v1/files/7"),
        (PROVIDER, "Location: /openai/health", "Location: /health"),
        ("unix:/run/vllm.sock", "Location: http://localhost/v1/x", "Location: /v1/x"),
    ],
)
def test_what_becomes_of_a_field(base_url: str, line: str, passes: str) -> None:
    around = "Content-Type: text/plain\r\nX-A: b\r\n"
    fields = f"{around}{line}\r\nX-Z: y\r\n".encode()
    assert as_ours(fields, base_url).decode() == around + (f"{passes}\r\n" if passes else "") + "X-Z: y\r\n"
    found = may_name([line.encode()]) or "//" in line or line.partition(":")[0].lower().encode() in REFERENCES
    assert found or passes == line, "nobody would have looked"


@pytest.mark.parametrize(
    ("line", "may"),
    [
        (b"content-type: text/event-stream; charset=utf-8", False),
        (b"date: Sat, 28 Nov 2026 17:35:40 GMT", False),
        (b"Server: uvicorn", False),
        (b"", False),
        (b"X-By: gpu-1:8000", True),
        (b"X-By: 10.0.0.5", True),
        (b"X-By: fd00::5", True),
    ],
)
def test_usual_fields_name_nobody(line: bytes, may: bool) -> None:
    """The heads of most responses are not searched for their endpoint's address."""
    assert may_name([b"X-A: b", line]) is may


@pytest.mark.parametrize(
    "base_url", ["http://a:1", "http://a:1/v1", "http://a:1/gpu-1", PROVIDER, "https://a:1/api/paas/v4", "unix:/s"]
)
@pytest.mark.parametrize("target", ["/v1/files/7?a=/v1/b", "/v1/chat/completions", "/health", "/tokenize?x"])
def test_it_is_the_reverse_of_below(base_url: str, target: str) -> None:
    assert above(base_url, below(base_url, target).encode()).decode() == target
