# SPDX-License-Identifier: Apache-2.0
"""SGLang's rendezvous between two simulated servers, as docs/decisions/0041 section 6 has it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx
import pytest

from tests.sim.mock.serving.pair import PROMPT, Pair, split, whole_text
from tests.support.aio import until

BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
GENERATE: dict[str, object] = {"text": PROMPT, "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}


def meet(test: Callable[[Pair], Awaitable[None]], role: str = "prefill", **options: object) -> None:
    """The test against two SGLangs; `role` is the first one's."""
    split(test, prefill={"bootstrap_port": 0, "role": role}, connector="sglang", engine="sglang", **options)


def met(pair: Pair, room: object = 7) -> dict[str, object]:
    """What a router adds."""
    address = pair.prefill.connector.address
    assert address is not None
    return {"bootstrap_host": address[0], "bootstrap_port": address[1], "bootstrap_room": room}


async def both(pair: Pair, body: dict[str, object], path: str = "/v1/completions") -> tuple[httpx.Response, ...]:
    """Prefill's response and decode's."""
    return tuple(await asyncio.gather(*(pair.post(server, body, path) for server in (pair.prefill, pair.decode))))


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_halves_meet_in_either_order(first: str) -> None:
    async def test(pair: Pair) -> None:
        body = BODY | met(pair)
        order = [pair.prefill, pair.decode] if first == "prefill" else [pair.decode, pair.prefill]
        begun = asyncio.create_task(pair.post(order[0], body))
        if first == "prefill":
            await until(lambda: pair.prefill.connector.queues()["num_prefill_bootstrap_queue_reqs"] == 1)
        else:
            await until(lambda: pair.decode.connector.queues()["num_decode_transfer_queue_reqs"] == 1)
        other = await pair.post(order[1], body)
        prefill, decode = (await begun, other) if first == "prefill" else (other, await begun)
        assert decode.json()["choices"][0]["text"] == expected
        (only,) = prefill.json()["choices"]
        assert only["text"] == expected[:4]
        assert only["finish_reason"] == "length"
        assert prefill.json()["usage"]["completion_tokens"] == 1
        await pair.settled()

    expected = whole_text(BODY)
    meet(test)


def test_streams_and_the_own_api() -> None:
    async def test(pair: Pair) -> None:
        prefill, decode = await both(pair, BODY | met(pair, 1) | {"stream": True})
        texts = []
        for response in (prefill, decode):
            lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            texts.append("".join(json.loads(line)["choices"][0]["text"] for line in lines))
        assert texts == [expected[:4], expected]
        prefill, decode = await both(pair, GENERATE | met(pair, 2), "/generate")
        assert decode.json()["text"] == expected
        assert prefill.json()["meta_info"]["completion_tokens"] == 1
        await pair.settled()

    expected = whole_text(BODY)
    meet(test)


def test_a_batch_has_a_room_for_each_prompt() -> None:
    async def test(pair: Pair) -> None:
        prompts = [PROMPT, "Another one. " * 30]
        lists = {name: [value] * 2 for name, value in met(pair).items()} | {"bootstrap_room": [11, 12]}
        for rooms in (lists, met(pair, 20)):
            _, decode = await both(pair, BODY | {"prompt": prompts} | rooms)
            assert [choice["text"] for choice in decode.json()["choices"]] == expected
        await pair.settled()

    expected = [whole_text(BODY), whole_text(BODY | {"prompt": "Another one. " * 30})]
    meet(test)


def test_usage_of_decode_is_that_of_prefill() -> None:
    async def test(pair: Pair) -> None:
        for room, cached in enumerate((0, 112)):
            _, decode = await both(pair, BODY | met(pair, room))
            assert decode.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}

    meet(test)


def test_neither_half_serves_whole_requests() -> None:
    async def test(pair: Pair) -> None:
        for response in await both(pair, BODY):
            assert response.status_code == 400
            assert "without bootstrap room id" in response.json()["error"]["message"]

    meet(test)


@pytest.mark.parametrize("kind", ["null", "room"])
def test_a_server_of_both_roles_ignores_the_fields(kind: str) -> None:
    async def test(pair: Pair) -> None:
        response = await pair.post(pair.prefill, BODY | ({} if kind == "null" else {"bootstrap_room": 3}))
        assert response.status_code == 200
        page = (await pair.client.get(f"{pair.prefill.url}/server_info")).json()
        assert page["disaggregation_mode"] == "null"

    meet(test, role="both")


def test_roles_are_told_by_server_info_and_metrics() -> None:
    async def test(pair: Pair) -> None:
        for server, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
            page = (await pair.client.get(f"{server.url}/server_info")).json()
            assert page["disaggregation_mode"] == role
            assert f'engine_type="{role}"' in (await pair.client.get(f"{server.url}/metrics")).text
        assert (await pair.client.get(f"{pair.prefill.url}/server_info")).json()[
            "disaggregation_bootstrap_port"
        ] == pair.prefill.connector.address[1]  # type: ignore[index]

    meet(test)


@pytest.mark.parametrize("leaves", ["prefill", "decode"])
def test_when_one_half_is_cancelled_the_other_fails(leaves: str) -> None:
    async def test(pair: Pair) -> None:
        long = {"prompt": PROMPT * 200, "max_tokens": 5} | met(pair)
        tasks = {
            "prefill": asyncio.create_task(pair.post(pair.prefill, long)),
            "decode": asyncio.create_task(pair.post(pair.decode, long)),
        }
        now = asyncio.get_running_loop().time
        await until(lambda: pair.prefill.driver.engine.requests(now=now()) == 1)  # type: ignore[union-attr]
        tasks[leaves].cancel()
        with suppress(asyncio.CancelledError):
            await tasks[leaves]
        (other,) = [task for name, task in tasks.items() if name != leaves]
        assert (await other).status_code == 500
        await pair.settled()

    meet(test, speed=1.0)


@pytest.mark.parametrize("comes", ["prefill", "decode"])
def test_a_half_whose_other_never_comes_fails_after_a_while(comes: str) -> None:
    async def test(pair: Pair) -> None:
        response = await pair.post(pair.prefill if comes == "prefill" else pair.decode, BODY | met(pair))
        assert response.status_code == 500
        if comes == "prefill":
            assert "Prefill bootstrap failed" in response.json()["error"]["message"]
            assert (await pair.metrics(pair.prefill))["sglang:num_bootstrap_failed_reqs_total"] == 1
        else:
            assert (await pair.metrics(pair.decode))["sglang:num_transfer_failed_reqs_total"] == 1
        # The room is free again.
        _, decode = await both(pair, BODY | met(pair))
        assert decode.status_code == 200
        await pair.settled()

    meet(test, kv_lease=2.0)


def test_a_prefill_that_is_gone_fails_the_decode() -> None:
    async def test(pair: Pair) -> None:
        begun = asyncio.create_task(pair.post(pair.decode, BODY | met(pair)))
        await until(lambda: pair.decode.driver.engine.gauges().deferred == 1)
        where = met(pair, 8)
        await pair.prefill.close()
        assert (await begun).status_code == 500
        assert (await pair.post(pair.decode, BODY | where)).status_code == 500
        assert pair.decode.driver.engine.gauges().kv_usage == 0

    meet(test)


def test_the_host_of_health_checks_transfers_nothing() -> None:
    async def test(pair: Pair) -> None:
        prefill, decode = await both(pair, BODY | {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0})
        assert prefill.status_code == 200
        assert decode.json()["choices"][0]["text"] != expected

    expected = whole_text(BODY)
    meet(test)


def test_a_room_that_is_taken_is_refused() -> None:
    async def test(pair: Pair) -> None:
        first = asyncio.create_task(pair.post(pair.prefill, BODY | met(pair)))
        await until(lambda: pair.prefill.connector.queues()["num_prefill_bootstrap_queue_reqs"] == 1)
        assert (await pair.post(pair.prefill, BODY | met(pair))).status_code == 400
        assert (await pair.post(pair.decode, BODY | met(pair))).status_code == 200
        assert (await first).status_code == 200

    meet(test)


@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_room": "7"},
        {"bootstrap_room": True},
        {"bootstrap_room": -1},
        {"bootstrap_room": 2**63},
        {"bootstrap_room": 1.5},
        {"bootstrap_room": []},
        {"bootstrap_room": [1, 2]},
        {"bootstrap_room": [None]},
        {"bootstrap_room": {}},
        {"bootstrap_room": 1, "bootstrap_host": 7},
        {"bootstrap_room": 1, "bootstrap_host": "a\nb"},
        {"bootstrap_room": 1, "bootstrap_host": "h" * 10_000},
        {"bootstrap_room": 1, "bootstrap_port": "8998"},
        {"bootstrap_room": 1, "bootstrap_port": 0},
        {"bootstrap_room": 1, "bootstrap_port": 65536},
    ],
)
def test_fields_of_the_wrong_type_are_refused(fields: dict[str, object]) -> None:
    async def test(pair: Pair) -> None:
        for response in await both(pair, BODY | fields):
            assert response.status_code == 400, response.text
        _, decode = await both(pair, BODY | met(pair))
        assert decode.status_code == 200

    meet(test)
