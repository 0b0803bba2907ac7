# SPDX-License-Identifier: Apache-2.0
"""What the balancer is told of the size of a prompt."""

from __future__ import annotations

import json

import pytest

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.models import ModelRules
from lbproxy.core.requests.outline import UNCUT_STRING_BYTES, LargeJson
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.headers import read_request_fields
from lbproxy.proxy.request.reading import LargeFacts, RequestReader
from lbproxy.proxy.request.routes import find_route
from tests.support.aio import run
from tests.support.pool import Pool, make_balancer, spec
from tests.support.rig import settings_for

PATH = "/v1/completions"


def placed(body: bytes) -> InferenceRequest:
    """What is placed for a large JSON body that is read as proxy/front/bodies.py does, but in one turn."""

    async def main() -> InferenceRequest:
        pool = Pool(make_balancer(policy="adaptive"), [spec(1)])
        try:
            reading = RequestReader(settings_for([spec(1).base_url]), pool.runtime, ModelRules({}))
            fields = read_request_fields([(b"Host", b"lb"), (b"Content-Type", b"application/json")])
            request = ClientRequest("POST", PATH, find_route("POST", PATH), fields, body)
            record = RequestRecord("r", "POST", PATH, "127.0.0.1", pool.runtime.now())
            large = LargeJson(body)
            while large.step():
                pass
            facts, request = reading.read(request, record, large)
            flattening = reading.flattening(request, facts)
            assert flattening is not None
            while flattening.step():
                pass
            return reading.interpret(request, record, LargeFacts(facts, flattening.prompt()))[1]
        finally:
            pool.connections.close()

    return run(main())


@pytest.mark.parametrize("share", [0.5, 2.0, 4.0])
def test_a_prompt_counts_with_the_bytes_that_are_omitted_from_its_outline(share: float) -> None:
    """Prompts of more than 4 MiB were counted with 57 % of their bytes, and their endpoints got too many of them."""
    prompt = "some text " * int(share * UNCUT_STRING_BYTES / 10)
    request = placed(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert request.prompt_bytes == pytest.approx(len(prompt), rel=0.01)
    assert request.block_keys


@pytest.mark.parametrize("name", ["prompt_cache_key", "previous_response_id"])
def test_names_that_a_body_gives_can_be_told_and_written_down(name: str) -> None:
    """Python's json accepts lone surrogates, no encoder does; names that differ still do."""
    path, found = "/v1/responses", []
    for value in ("\ud800", "\ud801", "\udfff\0"):
        body = json.dumps({"model": "m", "input": "x", name: value}).encode()
        request = placed_at_once(path, body)
        found.append(request.session if name == "prompt_cache_key" else request.response_id)
    assert len({str(one).encode() for one in found}) == 3


def placed_at_once(path: str, body: bytes) -> InferenceRequest:
    """What is placed for a small body."""

    async def main() -> InferenceRequest:
        pool = Pool(make_balancer(policy="adaptive"), [spec(1)])
        try:
            fields = read_request_fields([(b"Host", b"lb"), (b"Content-Type", b"application/json")])
            request = ClientRequest("POST", path, find_route("POST", path), fields, body)
            record = RequestRecord("r", "POST", path, "127.0.0.1", pool.runtime.now())
            return RequestReader(settings_for([spec(1).base_url]), pool.runtime, ModelRules({})).interpret(
                request, record
            )[1]
        finally:
            pool.connections.close()

    return run(main())
