# SPDX-License-Identifier: Apache-2.0
"""The server as clients see it: the openai SDK, raw HTTP, and clients that go away."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.core.engines.server_info import read_description
from lbproxy.sim.mock.http import MockOptions, MockServer, serve

FAST = MockOptions(speed=50.0)
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
ENDLESS = {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True}
"""Five minutes of work at the speed of the hardware."""


def run(test: Callable[[MockServer, openai.AsyncOpenAI], Awaitable[None]], options: MockOptions = FAST) -> None:
    """The test against a server of its own."""

    async def main() -> None:
        async with asyncio.timeout(60), MockServer(options) as server, sdk(server) as client:
            await test(server, client)

    asyncio.run(main())


@asynccontextmanager
async def sdk(server: MockServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def metric(server: MockServer, name: str) -> float:
    """The value of one sample on /metrics; with ranks, the sum of theirs."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"{server.url}/metrics")).text
    values = [s.value for family in text_string_to_metric_families(page) for s in family.samples if s.name == name]
    assert len(values) == server.options.ranks
    return sum(values)


async def becomes(server: MockServer, name: str, value: float) -> None:
    """Ask until a metric has the value. The test's own deadline ends it."""
    while await metric(server, name) != value:
        pass


def test_chat_streamed_says_what_chat_whole_says() -> None:
    async def test(_: MockServer, client: openai.AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(model="sim", messages=HELLO)
        choice = whole.choices[0]
        assert choice.message.content
        assert choice.finish_reason == "stop"
        assert whole.usage
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

        stream = await client.chat.completions.create(
            model="sim", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert "".join(texts) == choice.message.content
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        used = chunks[-1].usage
        assert used
        # One chunk opens the answer and one closes the stream; each other is a token.
        assert used.completion_tokens == whole.usage.completion_tokens == len(chunks) - 2
        assert (chunks[-1].choices, chunks[0].id.partition("-")[0], chunks[0].object) == (
            [],
            "chatcmpl",
            "chat.completion.chunk",
        )

    run(test)


def test_completion_honours_max_tokens_n_and_stop() -> None:
    async def test(_: MockServer, client: openai.AsyncOpenAI) -> None:
        default = await client.completions.create(model="sim", prompt="Hello")
        assert default.usage
        assert (default.usage.completion_tokens, default.choices[0].finish_reason) == (16, "length")
        several = await client.completions.create(model="sim", prompt=["a", "b"], n=2, max_tokens=20)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        assert len(several.choices[3].text) == 80
        word = several.choices[0].text[10:20]
        stopped = await client.completions.create(model="sim", prompt="a", max_tokens=20, stop=[word])
        assert stopped.choices[0].text == several.choices[0].text[:10]
        assert stopped.choices[0].finish_reason == "stop"

    run(test)


def test_completion_stream_interleaves_its_choices() -> None:
    async def test(_: MockServer, client: openai.AsyncOpenAI) -> None:
        whole = await client.completions.create(model="sim", prompt=["a", "b"], n=2, max_tokens=9)
        texts = [""] * 4
        ends = 0
        stream = await client.completions.create(model="sim", prompt=["a", "b"], n=2, max_tokens=9, stream=True)
        async for chunk in stream:
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            ends += choice.finish_reason == "length"
        assert texts == [choice.text for choice in whole.choices]
        assert ends == 4

    run(test)


def test_answers_depend_on_prompt_and_seed_not_on_the_server() -> None:
    """What a client gets must not show which server it was sent to."""

    async def said(server: MockServer, seed: int | None = None) -> str:
        async with sdk(server) as client:
            answer = await client.completions.create(model="sim", prompt="Hello", seed=seed)
            return answer.choices[0].text

    async def main() -> None:
        async with (
            MockServer(FAST) as one,
            MockServer(FAST) as two,
            MockServer(dataclasses.replace(FAST, seed=1)) as three,
        ):
            assert await said(one) == await said(one) == await said(two) != await said(three)
            assert await said(one, seed=5) == await said(two, seed=5) != await said(one)

    asyncio.run(main())


def test_repeated_prompt_hits_the_prefix_cache() -> None:
    async def test(server: MockServer, client: openai.AsyncOpenAI) -> None:
        for hits in (0, 240):
            answer = await client.completions.create(model="sim", prompt="four" * 256, max_tokens=4)
            assert answer.usage
            assert answer.usage.prompt_tokens_details
            assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (256, hits)
        assert await metric(server, "vllm:prefix_cache_hits_total") == 240
        assert await metric(server, "vllm:prefix_cache_queries_total") == 512
        assert await metric(server, "vllm:prompt_tokens_total") == 512
        assert await metric(server, "vllm:generation_tokens_total") == 8

    run(test)


def test_without_a_prefix_cache_no_prompt_hits_one() -> None:
    async def test(server: MockServer, client: openai.AsyncOpenAI) -> None:
        for _ in range(2):
            answer = await client.completions.create(model="sim", prompt="four" * 256, max_tokens=4)
            assert answer.usage
            details = answer.usage.prompt_tokens_details
            assert details is None or not details.cached_tokens
        assert await metric(server, "vllm:prefix_cache_queries_total") == 0

    run(test, dataclasses.replace(FAST, prefix_cache=False))


def test_choices_of_one_prompt_count_its_cached_tokens_once() -> None:
    async def test(_: MockServer, client: openai.AsyncOpenAI) -> None:
        answer = await client.completions.create(model="sim", prompt=["four" * 256] * 2, n=3, max_tokens=4)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        # The first choice computes the prompt, the five others find it; the second prompt is one of them.
        assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (512, 240)

    run(test)


def test_second_turn_of_a_chat_hits_what_was_generated_for_the_first() -> None:
    async def test(_: MockServer, client: openai.AsyncOpenAI) -> None:
        first = await client.chat.completions.create(model="sim", messages=HELLO, max_tokens=100)
        said = first.choices[0].message.content
        messages: list[ChatCompletionMessageParam] = [*HELLO, {"role": "assistant", "content": said}, *HELLO]
        second = await client.chat.completions.create(model="sim", messages=messages, max_tokens=1)
        assert first.usage
        assert second.usage
        assert second.usage.prompt_tokens_details
        computed = first.usage.total_tokens - 1
        assert second.usage.prompt_tokens_details.cached_tokens == computed // 16 * 16

    run(test)


def test_embeddings_are_the_same_in_both_encodings() -> None:
    """The SDK asks for base64 unless told otherwise."""

    async def test(server: MockServer, client: openai.AsyncOpenAI) -> None:
        encoded = await client.embeddings.create(model="sim", input=["a", "b"], dimensions=8)
        plain = await client.embeddings.create(model="sim", input=["a", "b"], dimensions=8, encoding_format="float")
        for left, right in zip(encoded.data, plain.data, strict=True):
            assert left.embedding == pytest.approx(right.embedding, abs=1e-6)
        assert (encoded.usage.prompt_tokens, len(plain.data[1].embedding)) == (2, 8)
        assert plain.data[0].embedding != plain.data[1].embedding
        await becomes(server, "vllm:num_requests_running", 0)

    run(test)


def test_errors_are_those_that_sdks_expect() -> None:
    async def test(_: MockServer, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="The model `other` does not exist"):
            await client.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
            await client.completions.create(model="sim", prompt="long" * 600)
        with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
            await client.completions.create(model="sim", prompt="x", max_tokens=-3, stream=True)

    run(test, dataclasses.replace(FAST, max_model_len=512))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "detail"),
    [
        ("POST", "/v1/completions", b'{"model":"sim","prompt":', 400, "JSON decode error"),
        ("GET", "/v1/completions", b"", 405, "Method Not Allowed"),
        ("HEAD", "/health", b"", 405, ""),
        ("GET", "/v1/nothing", b"", 404, '{"detail":"Not Found"}'),
        ("POST", "/v1/completions", b"x" * (64 * 2**20 + 1), 413, "Too Large"),
    ],
)
def test_raw_errors_keep_the_status_and_shape(method: str, path: str, body: bytes, status: int, detail: str) -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            answer = await client.request(method, path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == status
        assert detail in answer.text
        assert answer.headers.get("Allow") == ({"GET": "POST", "HEAD": "GET"}[method] if status == 405 else None)

    run(test)


def test_other_content_types_are_refused() -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            answer = await client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
        assert (answer.status_code, "Unsupported Media Type" in answer.text) == (400, True)

    run(test)


def test_side_routes_answer_as_recorded() -> None:
    async def test(server: MockServer, client: openai.AsyncOpenAI) -> None:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == ["sim"]
        async with httpx.AsyncClient(base_url=server.url) as raw:
            health = await raw.get("/health", headers={"X-Request-Id": "mine"})
            assert (health.status_code, health.content, health.headers["X-Request-Id"]) == (200, b"", "mine")
            assert "X-Request-Id" not in (await raw.get("/version")).headers
            assert (await raw.get("/version")).json() == {"version": "0.32.0"}
            tokens = (await raw.post("/tokenize", json={"prompt": "Hello world"})).json()
            assert (tokens["count"], tokens["max_model_len"]) == (3, 131_072)
            text = (await raw.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
            assert text == {"prompt": "Hello world"}
            answer = await raw.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
            assert answer.json()["id"] == "cmpl-mine"

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_aborts_its_work_at_once(stream: bool) -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client, asyncio.TaskGroup() as group:
            call = group.create_task(client.post("/v1/completions", json={**ENDLESS, "stream": stream}))
            await becomes(server, "vllm:num_requests_running", 1)
            call.cancel()
        await becomes(server, "vllm:num_requests_running", 0)
        assert await metric(server, "vllm:kv_cache_usage_perc") == 0
        assert await metric(server, "vllm:generation_tokens_total") < 50_000

    run(test, MockOptions())


def test_half_closed_connection_counts_as_a_client_that_left() -> None:
    """As recorded from vLLM: FIN from the client ends the request, although it could still read."""

    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        reader, writer = await asyncio.open_connection(server.options.host, server.port)
        body = b'{"prompt":"x","max_tokens":50000,"stream":true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        writer.write(head % len(body) + body)
        await becomes(server, "vllm:num_requests_running", 1)
        writer.write_eof()
        await becomes(server, "vllm:num_requests_running", 0)
        await reader.read()
        writer.close()
        await writer.wait_closed()

    run(test, MockOptions())


def test_idle_connections_are_closed_after_the_keep_alive() -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        reader, writer = await asyncio.open_connection(server.options.host, server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        # Returns at the end of the connection, and not before.
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        await writer.wait_closed()

    run(test, dataclasses.replace(FAST, keep_alive_s=0.05))


def test_close_cuts_streams_visibly_and_frees_the_port() -> None:
    """A stream must not look finished when its server went down."""

    async def main() -> None:
        server = MockServer(MockOptions())
        await server.start()
        async with httpx.AsyncClient() as client:
            async with client.stream(
                "POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}
            ) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                await server.close()
                with pytest.raises(httpx.RemoteProtocolError):
                    async for _ in lines:
                        pass
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{server.url}/health")
        await server.close()

    asyncio.run(main())


def test_many_streams_get_all_of_their_tokens() -> None:
    """A hundred at once through eight places: nothing is lost between the engine and the handlers."""

    async def test(server: MockServer, client: openai.AsyncOpenAI) -> None:
        async def read(index: int) -> None:
            stream = await client.completions.create(model="sim", prompt=str(index), max_tokens=20, stream=True)
            chunks = [chunk async for chunk in stream]
            assert len(chunks) == 20

        async with asyncio.TaskGroup() as group:
            for index in range(100):
                group.create_task(read(index))
        assert await metric(server, "vllm:generation_tokens_total") == 2000
        assert await metric(server, "vllm:num_requests_running") == 0

    run(test, dataclasses.replace(FAST, max_num_seqs=8))


def test_page_has_the_families_of_its_dialect() -> None:
    async def main() -> None:
        async with MockServer(dataclasses.replace(FAST, metric_names="old", kv_tokens=1600)) as server:
            assert await metric(server, "vllm:gpu_cache_usage_perc") == 0
            async with httpx.AsyncClient() as client:
                page = await client.get(f"{server.url}/metrics")
            assert page.headers["Content-Type"] == "text/plain; version=1.0.0; charset=utf-8"
            assert 'num_gpu_blocks="100"' in page.text
            assert "lbproxy_mock_step_lag_seconds" in page.text

    asyncio.run(main())


def test_serve_runs_until_cancelled() -> None:
    async def main() -> None:
        async with MockServer(FAST) as server:
            free = server.port
        url = f"http://127.0.0.1:{free}/health"
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(serve(dataclasses.replace(FAST, port=free)))
                while not await answers(client, url):
                    pass
                running.cancel()
            assert not await answers(client, url)

    async def answers(client: httpx.AsyncClient, url: str) -> bool:
        try:
            return (await client.get(url)).status_code == 200
        except httpx.ConnectError:
            return False

    asyncio.run(main())


@pytest.mark.parametrize(
    "wrong",
    [
        {"preset": "tpu"},
        {"speed": 0},
        {"metric_names": "sglang"},
        {"engine": "SGLang"},
        {"kv_tokens": 8},
        {"max_num_seqs": 0},
        {"max_model_len": 1},
        {"max_loras": 0},
        {"adapters": ("sim",)},
        {"adapters": ("a", "a")},
        {"adapters": ("a,b",)},
    ],
)
def test_options_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)).replace("max_num_seqs", "max_sequences")):
        MockOptions(**wrong)  # type: ignore[arg-type]


def test_taken_port_is_an_os_error() -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        with pytest.raises(OSError):
            await MockServer(dataclasses.replace(FAST, port=server.port)).start()

    run(test)


def test_load_is_said_with_whole_good_answers_to_those_who_ask() -> None:
    """As recorded of vLLM 0.32: not with streams, not with errors, not in a form that it does not know."""
    whole = {"model": "sim", "prompt": "x", "max_tokens": 2}

    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for path, fields, form, said in (
                ("/v1/completions", whole, "TEXT", True),
                ("/v1/completions", whole, "json", True),
                ("/v1/chat/completions", {"model": "sim", "messages": HELLO, "max_tokens": 2}, "text", True),
                ("/v1/completions", whole, "BIN", False),
                ("/v1/completions", whole, "", False),
                ("/v1/completions", {**whole, "stream": True}, "TEXT", False),
                ("/v1/completions", {**whole, "model": "nope"}, "TEXT", False),
            ):
                headers = {"endpoint-load-metrics-format": form} if form else {}
                reply = await client.post(path, json=fields, headers=headers)
                report = reply.headers.get("endpoint-load-metrics", "")
                assert report.partition(" ")[0] == (form.upper() if said else "")

    run(test)


def test_a_server_of_old_says_no_load_with_its_answers() -> None:
    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            fields = {"model": "sim", "prompt": "x", "max_tokens": 2}
            headers = {"endpoint-load-metrics-format": "TEXT"}
            assert (
                "endpoint-load-metrics"
                not in (await client.post("/v1/completions", json=fields, headers=headers)).headers
            )

    run(test, dataclasses.replace(FAST, metric_names="old"))


@pytest.mark.parametrize(
    ("engine", "pages"),
    [
        ("vllm", {}),
        ("sglang", {"/server_info": "max_total_num_tokens", "/get_server_info": "max_total_num_tokens"}),
        ("llamacpp", {"/props": "total_slots"}),
    ],
)
def test_engines_without_metrics_say_how_much_they_hold_and_run(
    engine: Literal["vllm", "sglang", "llamacpp"], pages: dict[str, str]
) -> None:
    """Each at its own place, by the fields that recordings have, and nobody else's; with its name on its models."""
    options = dataclasses.replace(FAST, engine=engine, kv_tokens=64_000, max_num_seqs=16)

    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["owned_by"] == engine
            assert (await client.get("/metrics")).status_code == (200 if engine == "vllm" else 404)
            for path in ("/server_info", "/get_server_info", "/props"):
                answer = await client.get(path)
                assert answer.status_code == (200 if path in pages else 404)
                if path in pages:
                    assert pages[path] in answer.json()
                    said = read_description(engine, answer.content)
                    assert said is not None
                    assert said[:3] == (64_000, engine == "llamacpp", 16)
            whole = {"model": "sim", "prompt": "x", "max_tokens": 2}
            reply = await client.post("/v1/completions", json=whole, headers={"endpoint-load-metrics-format": "TEXT"})
            assert ("endpoint-load-metrics" in reply.headers) is (engine == "vllm")

    run(test, options)


def test_llama_cpp_with_several_models_is_a_router() -> None:
    """It says of each whether it is in memory, and of itself no context."""
    options = dataclasses.replace(FAST, engine="llamacpp", adapters=("b",), max_loaded=1)

    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:

            async def states() -> dict[str, str]:
                pages = [(await client.get(path)).json()["data"] for path in ("/v1/models", "/models")]
                assert pages[0] == pages[1]
                return {one["id"]: one["status"]["value"] for one in pages[0]}

            assert await states() == {"sim": "unloaded", "b": "unloaded"}
            for model in ("sim", "b"):
                whole = {"model": model, "prompt": "x", "max_tokens": 2}
                assert (await client.post("/v1/completions", json=whole)).status_code == 200
            assert await states() == {"sim": "unloaded", "b": "loaded"}
            props = await client.get("/props")
            assert props.json()["max_instances"] == 1
            assert read_description("llamacpp", props.content) is None

    run(test, options)


def test_lm_studio_says_which_models_it_has_loaded_at_two_paths() -> None:
    options = dataclasses.replace(FAST, engine="lmstudio", adapters=("b",), max_loaded=1)

    async def test(server: MockServer, _: openai.AsyncOpenAI) -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            cards = (await client.get("/v1/models")).json()["data"]
            assert [(one["id"], one["owned_by"]) for one in cards] == [
                (name, "organization_owner") for name in ("sim", "b")
            ]
            assert (await client.post("/v1/completions", json={"model": "b", "prompt": "x"})).status_code == 200
            models = (await client.get("/api/v1/models")).json()["models"]
            assert [(one["key"], len(one["loaded_instances"])) for one in models] == [("sim", 0), ("b", 1)]
            older = (await client.get("/api/v0/models")).json()["data"]
            assert [(one["id"], one["state"]) for one in older] == [("sim", "not-loaded"), ("b", "loaded")]

    run(test, options)


def test_ranks_prefill_side_by_side_and_are_one_page() -> None:
    async def test(server: MockServer, client: openai.AsyncOpenAI) -> None:
        asks = [client.completions.create(model="sim", prompt=f"{n}", max_tokens=5, n=1) for n in range(6)]
        answers = await asyncio.gather(*asks)
        assert [answer.usage and answer.usage.completion_tokens for answer in answers] == [5] * 6
        assert await metric(server, "vllm:generation_tokens_total") == 30
        assert await metric(server, "vllm:num_requests_running") == 0

    run(test, dataclasses.replace(FAST, ranks=3))


def test_fixed_times() -> None:
    """Half a second, at 50 times the speed, and every token is there."""

    async def test(_: MockServer, client: openai.AsyncOpenAI) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        stream = await client.completions.create(model="sim", prompt="x" * 4000, max_tokens=9, stream=True)
        times = [loop.time() - begin async for chunk in stream if chunk.choices[0].text]
        assert len(times) == 9
        assert times[0] >= 0.2
        assert times[-1] >= 0.27  # not from the first one on, which a busy machine may read late

    run(test, MockOptions(ttft=10.0, token_time=0.5, speed=50.0))


@pytest.mark.parametrize(
    "given", [{"ranks": 0}, {"ranks": 2, "ttft": 1.0}, {"ttft": -1.0}, {"ttft": 1.0, "ttft_spread": 2.0}]
)
def test_servers_that_cannot_be(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        MockOptions(**given)  # type: ignore[arg-type]
