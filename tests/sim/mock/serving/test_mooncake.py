# SPDX-License-Identifier: Apache-2.0
"""Mooncake between two simulated servers, as docs/decisions/0041 section 4 has it of vLLM."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from lbproxy.sim.mock.connectors.mooncake import worker_of
from tests.sim.mock.serving.pair import PROMPT, Pair, split, whole_text
from tests.support.aio import until

BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}


def meet(test: Callable[[Pair], Awaitable[None]], **options: object) -> None:
    """The test against two vLLMs with Mooncake."""
    split(test, prefill={"bootstrap_port": 0}, connector="mooncake", **options)


def first(transfer_id: str = "t1", **more: object) -> dict[str, object]:
    """What a router makes of a body for the prefill."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return BODY | {"max_tokens": 1, "kv_transfer_params": params} | more


async def second(pair: Pair, transfer_id: str = "t1", **more: object) -> dict[str, object]:
    """And for the decode."""
    address = pair.prefill.connector.address
    assert address is not None
    bootstrap = f"http://{address[0]}:{address[1]}"
    page = (await pair.client.get(f"{bootstrap}/query")).json()
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": page["0"]["engine_id"],
        "transfer_id": transfer_id,
    }
    return BODY | {"kv_transfer_params": params | more}


@pytest.mark.parametrize("order", ["prefill", "decode"])
def test_the_halves_meet_in_either_order(order: str) -> None:
    async def test(pair: Pair) -> None:
        if order == "prefill":
            response = await pair.post(pair.prefill, first())
            assert response.json()["kv_transfer_params"] is None
            assert pair.held() == 8
            decode = await pair.post(pair.decode, await second(pair))
        else:
            begun = asyncio.create_task(pair.post(pair.decode, await second(pair)))
            await until(lambda: pair.decode.driver.engine.gauges().deferred == 1)
            await pair.post(pair.prefill, first())
            decode = await begun
        assert decode.json()["choices"][0]["text"] == expected
        await pair.settled()
        assert (await pair.metrics(pair.decode))["vllm:mooncake_num_descriptors_count"] == 1

    expected = whole_text(BODY)
    meet(test)


@pytest.mark.parametrize(("masked", "held"), [({}, 0), ({"min_tokens": 1}, 8)])
def test_kv_of_a_prefill_that_ends_by_itself_is_not_held(masked: dict[str, object], held: int) -> None:
    async def test(pair: Pair) -> None:
        body = first(ignore_eos=False, stop=[expected[:2]]) | masked
        response = await pair.post(pair.prefill, body)
        assert response.json()["choices"][0]["finish_reason"] == "stop"
        assert pair.held() == held

    expected = whole_text(BODY)
    meet(test)


def test_the_lease_ends_and_a_decode_waits_for_nothing() -> None:
    async def test(pair: Pair) -> None:
        await pair.post(pair.prefill, first())
        await until(lambda: pair.held() == 0)
        begun = asyncio.create_task(pair.post(pair.decode, await second(pair)))
        await until(lambda: pair.decode.driver.engine.gauges().deferred == 1)
        assert (await pair.post(pair.decode, BODY)).status_code == 200
        assert not begun.done()
        begun.cancel()
        with suppress(asyncio.CancelledError):
            await begun
        await pair.settled()

    meet(test, kv_lease=0.05)


@pytest.mark.parametrize("busy", [True, False], ids=["queued", "waiting"])
def test_a_decode_whose_client_leaves_frees_the_prefill(busy: bool) -> None:
    async def test(pair: Pair) -> None:
        gauges = pair.decode.driver.engine.gauges
        tasks = []
        if busy:
            tasks.append(asyncio.create_task(pair.post(pair.decode, BODY | {"max_tokens": 50_000})))
            await until(lambda: gauges().running == 1)
            await pair.post(pair.prefill, first())
        tasks.append(asyncio.create_task(pair.post(pair.decode, await second(pair))))
        await until(lambda: gauges().waiting == 1)
        for task in reversed(tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if not busy:
            # As if it had never come: the KV is held.
            await until(lambda: gauges().deferred == 0)
            await pair.post(pair.prefill, first("t2"))
            await pair.post(pair.decode, await second(pair, "t2"))
        await pair.settled()

    meet(test, max_num_seqs=1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_wrong_role_kills_the_engine(role: str) -> None:
    async def test(pair: Pair) -> None:
        wrong = await second(pair) if role == "prefill" else first()
        server = pair.prefill if role == "prefill" else pair.decode
        assert (await pair.post(server, wrong)).status_code == 500
        assert (await pair.client.get(f"{server.url}/health")).status_code == 503

    meet(test)


def test_another_start_and_a_dead_bootstrap_fail_the_decode() -> None:
    async def test(pair: Pair) -> None:
        for wrong in (
            {"remote_engine_id": "other"},
            {"remote_bootstrap_addr": "127.0.0.1:1"},
            {"remote_bootstrap_addr": "x"},
        ):
            assert (await pair.post(pair.decode, await second(pair, **wrong))).status_code == 500
        body = await second(pair)
        await pair.prefill.close()
        assert (await pair.post(pair.decode, body)).status_code == 500

    meet(test)


@pytest.mark.parametrize(
    "params", [7, {"do_remote_decode": True, "transfer_id": 7}, {"transfer_id": "a b"}, {"transfer_id": "x" * 10_000}]
)
def test_values_of_the_wrong_type_are_refused(params: object) -> None:
    async def test(pair: Pair) -> None:
        for server in (pair.prefill, pair.decode):
            assert (await pair.post(server, BODY | {"kv_transfer_params": params})).status_code == 400

    meet(test)


@pytest.mark.parametrize(
    "page",
    [
        *(b"", b"[]", b"{}", b'{"0":7}', b'{"0":{"engine_id":"e"}}', b'{"0":{"engine_id":"e","worker_addr":[]}}'),
        b'{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://[:1"}}}}',
        b'{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://h:99999"}}}}',
        b'{"0":{"engine_id":"other","worker_addr":{"0":{"0":"tcp://h:1"}}}}',
    ],
)
def test_a_page_that_does_not_name_the_worker(page: bytes) -> None:
    assert worker_of(page, "e") is None
