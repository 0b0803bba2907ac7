"""Settings become endpoints."""

from __future__ import annotations

from lbproxy.config import parse
from lbproxy.control.discovery import static_endpoints
from lbproxy.core.types import EndpointSpec

TEXT = """
endpoints:
  - http://gpu-1:8000
  - {url: "http://gpu-2:8000", name: two, engine: vllm, metrics: /load, health: null}
"""


def test_the_settings_endpoints_keep_their_order_and_every_key() -> None:
    assert static_endpoints(parse(TEXT, environ={})) == [
        EndpointSpec(name="gpu-1:8000", base_url="http://gpu-1:8000", engine="auto", metrics="auto", health="/health"),
        EndpointSpec(name="two", base_url="http://gpu-2:8000", engine="vllm", metrics="/load", health=None),
    ]
