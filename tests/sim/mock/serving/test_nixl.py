# SPDX-License-Identifier: Apache-2.0
"""NIXL between two simulated servers, as docs/decisions/0041 section 3 has it of vLLM."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from lbproxy.sim.mock.connectors.channel import MAX_LINE_BYTES
from lbproxy.sim.mock.connectors.nixl import Nixl
from lbproxy.sim.mock.http import MockOptions
from tests.sim.mock.serving.pair import PROMPT, Pair, split, whole_text
from tests.support.aio import until

BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
PREFILL: dict[str, object] = {
    "max_tokens": 1,
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
}
FIELDS = {
    *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id"),
    *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens"),
    *("remote_blocks_expiry_time", "remote_registration_generation", "transfer_mode", "remote_prefill_cached_tokens"),
}


async def prefilled(pair: Pair, body: dict[str, object] = BODY) -> dict[str, object]:
    """The params of a prompt that is held."""
    response = await pair.post(pair.prefill, body | PREFILL)
    assert response.status_code == 200
    params = response.json()["kv_transfer_params"]
    assert isinstance(params, dict)
    return params


def events(text: str) -> list[dict[str, object]]:
    """Of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and "[DONE]" not in line]


def text_of(response: httpx.Response) -> str:
    """Of a completion, streamed or not."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return "".join(choice["text"] for event in events(response.text) for choice in event["choices"])  # type: ignore[attr-defined]
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize("stream", [False, True])
def test_both_halves_say_what_one_server_says(stream: bool) -> None:
    body = BODY | {"stream": stream}

    async def test(pair: Pair) -> None:
        params = await prefilled(pair)
        assert set(params) == FIELDS
        assert params["remote_num_tokens"] == 124
        assert len(params["remote_block_ids"][0]) == 8  # type: ignore[index]
        assert pair.held() == 8
        response = await pair.post(pair.decode, body | {"kv_transfer_params": params})
        assert text_of(response) == whole_text_of_body
        await pair.settled()
        page = await pair.metrics(pair.decode)
        assert page["vllm:external_prefix_cache_hits_total"] == 124
        assert page["vllm:prefix_cache_hits_total"] == 0
        assert page["vllm:nixl_num_descriptors_count"] == 1
        assert pair.decode.driver.engine.gauges().transfers == 1

    whole_text_of_body = whole_text(BODY)
    split(test, connector="nixl")


@pytest.mark.parametrize("request_id", ["two words", "x" * 5000])
def test_a_clients_request_id_does_not_matter(request_id: str) -> None:
    async def test(pair: Pair) -> None:
        pair.client.headers["X-Request-Id"] = request_id
        params = await prefilled(pair)
        response = await pair.post(pair.decode, BODY | {"kv_transfer_params": params})
        assert text_of(response) == expected
        await pair.settled()

    expected = whole_text(BODY)
    split(test, connector="nixl")


def test_role_and_connector_are_recognised_by_the_metrics() -> None:
    """Also before any traffic."""

    async def test(pair: Pair) -> None:
        prefill, decode = await pair.metrics(pair.prefill), await pair.metrics(pair.decode)
        assert "vllm:nixl_num_failed_transfers_total" in prefill
        assert "vllm:nixl_num_failed_transfers_total" in decode
        assert "vllm:num_requests_kv_fetch_by_stage" not in prefill
        assert "vllm:num_requests_kv_fetch_by_stage" in decode

    split(test, connector="nixl")


def test_chat_messages_and_responses_are_split_as_well() -> None:
    async def test(pair: Pair) -> None:
        for path, prompt, limit in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}, "max_completion_tokens"),
            ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}]}, "max_tokens"),
            ("/v1/responses", {"input": PROMPT}, "max_output_tokens"),
        ):
            body = {"model": "sim", **prompt}
            first = await pair.post(pair.prefill, body | PREFILL | {limit: 1}, path)
            params = first.json()["kv_transfer_params"]
            assert set(params) == FIELDS, path
            whole = (await pair.post(pair.prefill, body | {limit: 20}, path)).json()
            split = (await pair.post(pair.decode, body | {limit: 20, "kv_transfer_params": params}, path)).json()
            for key in ("choices", "content"):
                assert split.get(key) == whole.get(key), path
        assert pair.decode.driver.engine.gauges().transfers == 3
        await pair.settled()

    split(test, connector="nixl")


def test_a_streaming_prefill_has_the_params_in_its_last_event() -> None:
    async def test(pair: Pair) -> None:
        response = await pair.post(pair.prefill, BODY | PREFILL | {"stream": True})
        last = events(response.text)[-1]
        params = last["kv_transfer_params"]
        assert set(params) == FIELDS  # type: ignore[call-overload]
        await pair.post(pair.decode, BODY | {"kv_transfer_params": params})
        await pair.settled()

    split(test, connector="nixl")


def test_usage_shows_what_prefill_had_cached() -> None:
    async def test(pair: Pair) -> None:
        for cached in (0, 112):
            params = await prefilled(pair)
            assert params["remote_prefill_cached_tokens"] == cached
            response = await pair.post(pair.decode, BODY | {"kv_transfer_params": params})
            assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
            assert response.json()["kv_transfer_params"] is None
        params = await prefilled(pair)
        del params["remote_prefill_cached_tokens"]
        response = await pair.post(pair.decode, BODY | {"kv_transfer_params": params})
        assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 124}

    split(test, connector="nixl")


def test_after_the_lease_the_text_is_something_else() -> None:
    """Silently, with 200."""

    async def test(pair: Pair) -> None:
        params = await prefilled(pair)
        await until(lambda: pair.held() == 0)
        response = await pair.post(pair.decode, BODY | {"kv_transfer_params": params})
        assert response.status_code == 200
        assert len(text_of(response)) == len(expected)
        assert text_of(response) != expected
        assert pair.decode.driver.engine.gauges().garbage == 1
        assert (await pair.metrics(pair.prefill))["vllm:nixl_num_kv_expired_reqs_total"] == 1

    expected = whole_text(BODY)
    split(test, connector="nixl", kv_lease=0.05)


@asynccontextmanager
async def started(pair: Pair, body: dict[str, object]) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A decode whose client leaves at the end."""
    task = asyncio.create_task(pair.post(pair.decode, body))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_decode_that_waits_for_a_slot_keeps_the_lease() -> None:
    async def test(pair: Pair) -> None:
        gauges = pair.decode.driver.engine.gauges
        async with started(pair, {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True}):
            await until(lambda: gauges().running == 1)
            params = await prefilled(pair)
            decode = asyncio.create_task(pair.post(pair.decode, BODY | {"kv_transfer_params": params}))
            await until(lambda: gauges().waiting == 1)
            assert isinstance(pair.prefill.connector, Nixl)
            (hold,) = pair.prefill.connector.held.values()
            first_end = hold.expires_at
            await until(lambda: hold.expires_at > first_end)
            assert pair.held() == 8
        assert text_of(await decode) == expected
        await pair.settled()

    expected = whole_text(BODY)
    split(test, connector="nixl", kv_lease=3.0, max_num_seqs=1)


@pytest.mark.parametrize("busy", [True, False], ids=["queued", "running"])
def test_a_client_that_leaves_decode_frees_the_prefill(busy: bool) -> None:
    async def test(pair: Pair) -> None:
        params = await prefilled(pair)
        endless = {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True}
        gauges = pair.decode.driver.engine.gauges
        async with started(pair, endless if busy else {"prompt": "y", "max_tokens": 1}) as first:
            await until(lambda: gauges().running == 1 or first.done())
            async with started(pair, endless | {"prompt": PROMPT, "kv_transfer_params": params}):
                await until(lambda: gauges().waiting == 1 if busy else gauges().running == 1)
                assert pair.held() == (8 if busy else 0)
            await until(lambda: pair.held() == 0)
        await pair.settled()

    split(test, connector="nixl", max_num_seqs=1)


def test_a_decode_that_is_refused_by_its_handler_frees_the_prefill() -> None:
    """Refused after its body was read: a model that is not there, too many tokens."""

    async def test(pair: Pair) -> None:
        for wrong, status in (({"model": "other"}, 404), ({"max_tokens": 10**6}, 400)):
            params = await prefilled(pair)
            response = await pair.post(pair.decode, BODY | wrong | {"kv_transfer_params": params})
            assert response.status_code == status
            await until(lambda: pair.held() == 0)

    split(test, connector="nixl")


def test_a_prefill_whose_client_leaves_is_not_held() -> None:
    async def test(pair: Pair) -> None:
        body = BODY | PREFILL | {"prompt": PROMPT * 100}
        task = asyncio.create_task(pair.post(pair.prefill, body))
        await until(lambda: pair.prefill.driver.engine.requests(now=asyncio.get_running_loop().time()) == 1)  # type: ignore[union-attr]
        task.cancel()
        await pair.settled()

    split(test, connector="nixl", speed=1.0)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("stream", [False, True])
def test_kv_of_a_prefill_that_is_gone(policy: str, stream: bool) -> None:
    """A stream fails with 200, in its first event."""

    async def test(pair: Pair) -> None:
        params = await prefilled(pair)
        await pair.prefill.close()
        response = await pair.post(pair.decode, BODY | {"stream": stream, "kv_transfer_params": params})
        if policy == "recompute":
            assert text_of(response) == expected
        elif stream:
            assert response.status_code == 200
            assert response.text.endswith("data: [DONE]\n\n")
            (only,) = events(response.text)
            assert only["error"]["code"] == 500  # type: ignore[index]
        else:
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "Internal server error"
        assert (await pair.metrics(pair.decode))["vllm:nixl_num_failed_transfers_total"] == 1
        assert pair.decode.driver.engine.gauges().kv_usage == 0

    expected = whole_text(BODY)
    split(test, connector="nixl", kv_load_failure=policy)


def test_a_prefill_that_was_restarted_is_not_read() -> None:
    """It has another engine id."""

    async def test(pair: Pair) -> None:
        params = await prefilled(pair)
        wrong = params | {"remote_engine_id": "0" * 32}
        response = await pair.post(pair.decode, BODY | {"kv_transfer_params": wrong})
        assert response.status_code == 500
        assert pair.held() == 8

    split(test, connector="nixl")


def test_decode_params_without_blocks_kill_the_engine() -> None:
    """So a router never passes on what a client says."""

    async def test(pair: Pair) -> None:
        other = asyncio.create_task(pair.post(pair.decode, {"prompt": "x", "max_tokens": 50_000, "ignore_eos": True}))
        await until(lambda: pair.decode.driver.engine.gauges().running == 1)
        response = await pair.post(pair.decode, BODY | {"kv_transfer_params": {"do_remote_prefill": True}})
        for died in (response, await other, await pair.post(pair.decode, BODY)):
            assert died.status_code == 500
            assert "EngineCore" in died.json()["error"]["message"]
        assert (await pair.client.get(f"{pair.decode.url}/health")).status_code == 503
        assert (await pair.client.get(f"{pair.prefill.url}/health")).status_code == 200

    split(test, connector="nixl")


@pytest.mark.parametrize("missing", ["remote_host", "remote_port", "remote_engine_id", "remote_request_id"])
def test_incomplete_decode_params_hang(missing: str) -> None:
    async def test(pair: Pair) -> None:
        params = await prefilled(pair)
        del params[missing]
        async with started(pair, BODY | {"kv_transfer_params": params}):
            await until(lambda: pair.decode.driver.engine.gauges().deferred == 1)
            # Others are served meanwhile, and it still waits.
            for _ in range(3):
                assert (await pair.post(pair.decode, BODY)).status_code == 200
            page = (await pair.client.get(f"{pair.decode.url}/metrics")).text
            for name in (
                'vllm:num_requests_waiting{engine="0",model_name="sim"}',
                'vllm:num_requests_waiting_by_reason{engine="0",model_name="sim",reason="deferred"}',
                'vllm:num_requests_kv_fetch_by_stage{engine="0",model_name="sim",stage="in_progress"}',
            ):
                assert f"{name} 1.0\n" in page
        await until(lambda: pair.decode.driver.engine.gauges().deferred == 0)

    split(test, connector="nixl")


def test_several_prompts_read_the_first_ones_kv() -> None:
    """Of a list of prompts the response tells of the first one alone."""

    async def test(pair: Pair) -> None:
        prompts = [PROMPT, "Another one. " * 30]
        body = BODY | {"prompt": prompts}
        whole = (await pair.post(pair.prefill, body)).json()["choices"]
        params = await prefilled(pair, body)
        assert params["remote_num_tokens"] == 124
        split = (await pair.post(pair.decode, body | {"kv_transfer_params": params})).json()["choices"]
        assert split[0]["text"] == whole[0]["text"]
        assert split[1]["text"] != whole[1]["text"]
        # What was held for the second is stranded, for the lease.
        await until(lambda: pair.held() == 7)

    split(test, connector="nixl")


@pytest.mark.parametrize(
    "params",
    [
        "nixl",
        [],
        {"do_remote_prefill": "yes"},
        {"do_remote_decode": 1},
        {"do_remote_prefill": True, "remote_block_ids": "0"},
        {"do_remote_prefill": True, "remote_block_ids": [[1], 2]},
        {"do_remote_prefill": True, "remote_block_ids": [["a"]]},
        {"do_remote_prefill": True, "remote_block_ids": [[-1]]},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "remote_host": 7},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "remote_host": "a\nb"},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "remote_host": "h" * 10_000},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "remote_port": "5600"},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "remote_port": 65536},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "remote_port": -1},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "remote_prefill_cached_tokens": 2**40},
        {"do_remote_prefill": True, "remote_block_ids": [[0]], "tp_size": 0.5},
        {"do_remote_prefill": True, "remote_block_ids": [[True]]},
    ],
)
def test_params_of_the_wrong_type_are_refused(params: object) -> None:
    async def test(pair: Pair) -> None:
        for server in (pair.prefill, pair.decode):
            response = await pair.post(server, BODY | {"kv_transfer_params": params})
            assert response.status_code == 400, response.text
            assert (await pair.post(server, BODY)).status_code == 200

    split(test, connector="nixl")


@pytest.mark.parametrize("host", ["no such host", "127.0.0.1", "::::", "\u00e9" * 70, "a" * 300])
def test_addresses_that_lead_nowhere_fail_the_load(host: str) -> None:
    async def test(pair: Pair) -> None:
        params = await prefilled(pair) | {"remote_host": host, "remote_port": 1}
        response = await pair.post(pair.decode, BODY | {"kv_transfer_params": params})
        assert response.status_code == 500
        assert (await pair.post(pair.decode, BODY)).status_code == 200

    split(test, connector="nixl")


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"claim\n",
        b"claim a b c\n",
        b"\xff\xfe\n",
        b"x" * 10 * MAX_LINE_BYTES,
        b"room 1\n",
        b"done\nbeat\nwhat\n",
    ],
)
def test_strangers_at_the_side_channel_do_no_harm(said: bytes) -> None:
    async def test(pair: Pair) -> None:
        address = pair.prefill.connector.address
        assert address is not None
        params = await prefilled(pair)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(said)
        assert await reader.read() in (b"", b"expired\n")
        writer.close()
        response = await pair.post(pair.decode, BODY | {"kv_transfer_params": params})
        assert text_of(response) == expected

    expected = whole_text(BODY)
    split(test, connector="nixl")


def test_without_a_connector_the_params_are_ignored() -> None:
    """As by vLLM."""

    async def test(pair: Pair) -> None:
        response = await pair.post(pair.prefill, BODY | PREFILL)
        assert response.json()["kv_transfer_params"] is None

    split(test, prefill={"role": "both", "connector": None}, connector="nixl")


def test_the_sdk_sees_an_error_in_the_first_event() -> None:
    async def test(pair: Pair) -> None:
        params = await prefilled(pair)
        await pair.prefill.close()
        async with openai.AsyncOpenAI(base_url=f"{pair.decode.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(
                model="sim", prompt=PROMPT, stream=True, extra_body={"kv_transfer_params": params}
            )
            with pytest.raises(openai.APIError):
                await anext(aiter(stream))

    split(test, connector="nixl")


@pytest.mark.parametrize(
    "options",
    [
        {"role": "prefill"},
        {"role": "both", "connector": "other"},
        {"role": "other", "connector": "nixl"},
        {"connector": "sglang"},
        {"connector": "nixl", "engine": "sglang"},
        {"connector": "nixl", "ttft": 1.0},
        {"connector": "nixl", "kv_lease": 0.0},
        {"connector": "nixl", "kv_lease": float("nan")},
        {"connector": "nixl", "side_channel_port": 65536},
        {"connector": "nixl", "kv_load_failure": "ignore"},
        {"connector": "shared-storage"},
        {"connector": "nixl", "shared_storage_path": "/tmp"},
    ],
)
def test_options_that_cannot_be_together(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|needs|cannot"):
        MockOptions(**options)  # type: ignore[arg-type]
