# SPDX-License-Identifier: Apache-2.0
"""The simulated server as a paid provider: what a client, or a balancer, gets from one."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import openai
import pytest

from lbproxy.sim.mock.http import MockOptions, MockServer

KEY = "sk-simulated"
FAST = MockOptions(speed=50.0, model="their-name", path_prefix="/openai/v1", require_key=KEY)
CHAT = {"model": "their-name", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def run(test: Callable[[MockServer, httpx.AsyncClient], Awaitable[None]], options: MockOptions = FAST) -> None:
    """The test against a provider of its own, with a client that has the key."""

    async def main() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            asyncio.timeout(60),
            MockServer(options) as server,
            httpx.AsyncClient(base_url=server.url, headers=headers) as client,
        ):
            await test(server, client)

    asyncio.run(main())


def with_limits(*, requests: int | None = None, tokens: int | None = None) -> MockOptions:
    """A provider with these limits a minute."""
    return MockOptions(speed=50.0, model="their-name", requests_per_minute=requests, tokens_per_minute=tokens)


def error_of(response: httpx.Response) -> dict[str, object]:
    """The error in OpenAI's form: these four fields, and no others."""
    error: dict[str, object] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_the_api_is_below_its_prefix_and_nothing_is_elsewhere() -> None:
    async def test(_: MockServer, client: httpx.AsyncClient) -> None:
        whole = await client.post("/openai/v1/chat/completions", json=CHAT)
        assert whole.status_code == 200
        assert whole.json()["usage"]["completion_tokens"] == 4
        models = (await client.get("/openai/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["their-name"]
        assert "max_model_len" not in models[0]
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/chat/completions"),
            ("POST", "/openai/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/health"),
            ("GET", "/metrics"),
            ("GET", "/version"),
            ("POST", "/tokenize"),
            ("POST", "/reset_prefix_cache"),
        ):
            # Without the key too: a path that is not there is no secret.
            response = await client.request(method, path, json=CHAT, headers={"Authorization": ""})
            assert response.status_code == 404, path
            assert error_of(response)["message"] == f"Invalid URL ({method} {path})"
        wrong = await client.get("/openai/v1/chat/completions")
        assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_supported")

    run(test)


def test_streams_are_served_to_the_sdk_as_everywhere() -> None:
    async def test(server: MockServer, _: httpx.AsyncClient) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/openai/v1", api_key=KEY, max_retries=0) as client:
            stream = await client.completions.create(model="their-name", prompt="Hello", max_tokens=7, stream=True)
            assert len([chunk async for chunk in stream]) == 7
            responses = await client.responses.create(model="their-name", input="Hello", max_output_tokens=3)
            assert responses.output_text

    run(test)


@pytest.mark.parametrize(
    ("authorization", "code"),
    [("", None), ("Basic c2s6", None), ("Bearer", None), ("Bearer sk-other", "invalid_api_key")],
)
def test_without_its_key_nothing_is_served(authorization: str, code: str | None) -> None:
    async def test(server: MockServer, client: httpx.AsyncClient) -> None:
        headers = {"Authorization": authorization}
        for response in (
            await client.post("/openai/v1/chat/completions", json=CHAT, headers=headers),
            await client.get("/openai/v1/models", headers=headers),
        ):
            assert response.status_code == 401
            error = error_of(response)
            assert (error["type"], error["code"]) == ("invalid_request_error", code)
            assert KEY not in response.text
        assert not server.driver.finished

    run(test)


def test_only_its_own_model_is_known() -> None:
    async def test(_: MockServer, client: httpx.AsyncClient) -> None:
        other = await client.post("/openai/v1/chat/completions", json=CHAT | {"model": "our-name"})
        assert other.status_code == 404
        assert (error_of(other)["code"], error_of(other)["param"]) == ("model_not_found", "model")
        none = await client.post("/openai/v1/chat/completions", json={"messages": CHAT["messages"]})
        assert (none.status_code, error_of(none)["message"]) == (400, "you must provide a model parameter")
        wrong = await client.post("/openai/v1/chat/completions", json=CHAT | {"messages": 3})
        assert (wrong.status_code, error_of(wrong)["type"]) == (400, "invalid_request_error")
        broken = await client.post(
            "/openai/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"}
        )
        assert (broken.status_code, error_of(broken)["code"]) == (400, None)

    run(test)


def test_requests_over_the_limit_get_429_with_the_time_to_wait() -> None:
    async def test(_: MockServer, client: httpx.AsyncClient) -> None:
        good = await client.post("/v1/chat/completions", json=CHAT)
        assert good.headers["x-ratelimit-limit-requests"] == "2"
        assert good.headers["x-ratelimit-remaining-requests"] == "1"
        assert "x-ratelimit-limit-tokens" not in good.headers
        async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
            assert stream.headers["x-ratelimit-remaining-requests"] == "0"
            await stream.aread()
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429
        error = error_of(refused)
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert str(error["message"]).startswith("Rate limit reached for their-name on requests per min (RPM): Limit 2,")
        # Half a minute from the first request on, which was a moment ago.
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
        assert (await client.get("/v1/models")).status_code == 200  # asking for models is free

    run(test, with_limits(requests=2))


def test_tokens_are_charged_before_they_are_generated() -> None:
    async def test(server: MockServer, client: httpx.AsyncClient) -> None:
        long = CHAT | {"max_tokens": 600}
        assert (await client.post("/v1/chat/completions", json=long)).status_code == 200
        refused = await client.post("/v1/chat/completions", json=long)
        assert (refused.status_code, error_of(refused)["type"]) == (429, "tokens")
        assert 0 < int(refused.headers["Retry-After"]) <= 60
        large = await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2000})
        assert (large.status_code, "Retry-After" in large.headers) == (429, False)
        assert str(error_of(large)["message"]).startswith("Request too large for their-name on tokens per min (TPM)")
        assert server.driver.finished.total() == 1

    run(test, with_limits(tokens=1000))


def test_faults_are_those_of_the_api_wherever_it_is() -> None:
    async def test(_: MockServer, client: httpx.AsyncClient) -> None:
        await client.post("/faults", content="status code=503 on=requests", headers={"Authorization": ""})
        assert (await client.post("/openai/v1/chat/completions", json=CHAT)).status_code == 503
        assert (await client.get("/openai/v1/models")).status_code == 200

    run(test)


@pytest.mark.parametrize(
    "wrong",
    [
        {"path_prefix": "openai/v1"},
        {"path_prefix": "/openai/v1/"},
        {"path_prefix": "/"},
        {"path_prefix": "/{x}"},
        {"path_prefix": "/a?b"},
        {"require_key": "clé"},
        {"requests_per_minute": 0},
        {"tokens_per_minute": -1},
    ],
)
def test_providers_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MockOptions(**wrong)  # type: ignore[arg-type]
