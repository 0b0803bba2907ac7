# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers, one for prefill and one for decode: what lbproxy splits is said as one server says it, its KV
cache is really handed over, and whatever is killed or left in between, nothing fails or stays behind.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.real import servers
from tests.real.apis import APIS, TIMEOUT_S, Api, Fields, Said, ask, streamed
from tests.real.environment import Environment
from tests.real.load import Load, failures, told
from tests.real.servers import MODEL, Apart, LlmServer, sum_of, wait_until

Found = Callable[[str], None]
BLOCK = 32
AT_ONCE = 8
TOKENS = 24
WORDS = ["the", "value", "of", "an", "object", "is", "not", "a", "name", "in", "this", "class", "or", "module"]
LEASE_S = 30.0
"""vLLM's `kv_lease_duration` with NIXL."""
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture(scope="module", params=["shared-storage", "nixl"])
def started_apart(parts: Environment, request: pytest.FixtureRequest, found: Found) -> Iterator[Apart]:
    began = time.monotonic()
    with servers.apart(parts, request.param) as pair:
        found(f"{pair.connector}: prefill, decode and lbproxy ready after {time.monotonic() - began:.0f} s")
        yield pair


@pytest.fixture
def pair(started_apart: Apart) -> Apart:
    """Both up and idle, whatever the test before did to them."""
    started_apart.bring_up()
    return started_apart


class Counted:
    """What the counters of a server grow by."""

    def __init__(self, server: LlmServer) -> None:
        self._server, self._before = server, server.page()

    def __call__(self, family: str, *labels: str) -> float:
        return sum_of(self._server.page(), family, *labels) - sum_of(self._before, family, *labels)

    def prompt_tokens(self, source: str) -> float:
        """Of the prompts that it took, those that came from this source."""
        return self("vllm:prompt_tokens_by_source_total", f'source="{source}"')


def text(words: int, seed: int) -> str:
    """A prompt that no other test sends."""
    choose = random.Random(f"{seed} {words}")
    return " ".join([str(seed), *(choose.choice(WORDS) for _ in range(words))])


def token_ids(count: int, seed: int) -> list[int]:
    """A prompt of exactly so many tokens, none of them special."""
    choose = random.Random(f"{seed} {count}")
    return [choose.randrange(300, 1000) for _ in range(count)]


def rest(pair: Apart, within_s: float = LEASE_S * 2) -> float:
    """Wait until nothing runs or waits anywhere and no block is held, and return the seconds; AssertionError if not."""
    began = time.monotonic()

    def idle() -> bool:
        pages = [one.page() for one in pair.both]
        busy = sum(sum_of(page, f"vllm:{name}") for page in pages for name in GAUGES)
        return busy == 0 and all(one["in_flight"] == 0 for one in pair.endpoints().values())

    wait_until(idle, "nothing runs, waits or is held", within_s=within_s)
    return time.monotonic() - began


SEEDS = {name: number for number, name in enumerate(APIS)}


def texts(seed: int) -> list[str]:
    """Short ones, longer than a block, and much longer."""
    return [text(words, seed) for words in (1, 5, 20, 40, 70, 150, 300, 600)]


@pytest.mark.parametrize("name", APIS)
def test_what_is_split_is_said_as_one_server_says_it(pair: Apart, name: str, found: Found) -> None:
    """The prefill server, asked directly, is that server: what it computes was not handed over."""
    api, prompts = APIS[name], texts(20 + SEEDS[name])
    wanted = [ask(pair.prefill.url, api, api.body(one, TOKENS)) for one in prompts]
    counted = Counted(pair.decode)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        whole = list(pool.map(lambda one: ask(pair.url, api, api.body(one, TOKENS)), prompts))
        stream = list(pool.map(lambda one: ask(pair.url, api, streamed(api, api.body(one, TOKENS))), prompts))
    handed = counted.prompt_tokens("external_kv_transfer")
    lengths = [one.prompt_tokens for one in wanted]
    found(
        f"{pair.connector}: {name}, prompts of {lengths} tokens: {handed:.0f} handed over, cached: "
        f"{[one.cached_tokens for one in whole]}, streamed: {[one.cached_tokens for one in stream]}"
    )
    assert [without_cached(one) for one in whole] == [without_cached(one) for one in wanted]
    assert [without_cached(one) for one in stream] == [without_cached(one) for one in wanted]
    assert handed > 0
    rest(pair)


def without_cached(said: Said) -> Said:
    """How much of a prompt was cached differs from server to server."""
    return said._replace(cached_tokens=0)


EDGES = (2, 31, 32, 33, 34, 63, 64, 65, 66, 96, 97, 128, 129, 500, 1025)
"""Lengths of prompts in tokens, at and around the ends of blocks."""


def is_fatal(connector: str, count: int) -> bool:
    """vLLM's ExampleConnector counts a negative number of tokens as found, and the server ends, if a prompt of such a
    length is sent to it again.
    """
    return connector == "shared-storage" and (count - 1) % BLOCK == 0


def test_prompts_that_end_where_a_block_does(pair: Apart, found: Found) -> None:
    """Each is sent alone, so that the counters say how much of it was handed over."""
    api, handed = APIS["completions"], {}
    counts = [count for count in EDGES if not is_fatal(pair.connector, count)]
    for count in counts:
        body = api.body("", TOKENS) | {"prompt": token_ids(count, 2)}
        wanted = ask(pair.prefill.url, api, body)
        counted = Counted(pair.decode)
        said = ask(pair.url, api, body)
        assert without_cached(said) == without_cached(wanted), count
        handed[count] = int(counted.prompt_tokens("external_kv_transfer")), said.cached_tokens
    found(f"{pair.connector}: tokens of a prompt: (handed over, cached by its usage): {handed}")
    wanted_tokens = {count: tokens_handed_over(pair.connector, count) for count in counts}
    assert {count: tokens for count, (tokens, _) in handed.items()} == wanted_tokens
    rest(pair)


def tokens_handed_over(connector: str, count: int) -> int:
    """Of a prompt of so many tokens, as 0041 says."""
    return count if connector == "nixl" else (count - 1) // BLOCK * BLOCK


WHOLE: dict[str, Fields] = {
    "n": {"prompt": text(60, 3), "n": 2, "temperature": 0.7, "seed": 1},
    "prompts": {"prompt": [text(60, 4), text(70, 5)]},
    "echo": {"prompt": text(60, 6), "echo": True},
    "one token": {"prompt": text(60, 8), "max_tokens": 1},
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_split_is_served_whole(pair: Apart, name: str) -> None:
    body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, **WHOLE[name]}

    def choices(url: str) -> list[str]:
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).raise_for_status()
        return [choice["text"] for choice in response.json()["choices"]]

    counted = [Counted(one) for one in pair.both]
    said = choices(pair.url)
    first, second = (one("vllm:request_success_total") for one in counted)
    assert (first, second) == (0, len(said))
    assert said == choices(pair.prefill.url)
    rest(pair)


def test_a_client_cannot_read_what_belongs_to_another_request(pair: Apart) -> None:
    """Sent to vLLM, the second of these would end its engine."""
    body = {"model": MODEL, "prompt": text(60, 9), "max_tokens": TOKENS}
    counted = [Counted(one) for one in pair.both]
    for params in ({"do_remote_decode": True}, {"do_remote_prefill": True}, {"remote_engine_id": "x"}, {}):
        response = httpx.post(f"{pair.url}/v1/completions", json={**body, "kv_transfer_params": params})
        assert response.status_code == 400, params
        assert response.json()["error"]["code"] == "reserved_field"
    assert [one("vllm:request_success_total") for one in counted] == [0, 0]
    assert ask(pair.url, APIS["completions"], body).completion_tokens == TOKENS
    assert all(one.alive for one in pair.both)


# --- Clients that leave -----------------------------------------------------------------------------------------------


class Leaving:
    """A request of a client that leaves."""

    def __init__(self, pair: Apart, seed: int, *, tokens: int = 1000) -> None:
        prompt = text(200, seed)
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True})
        address = httpx.URL(pair.url)
        self.socket = socket.create_connection((address.host, address.port or 80), timeout=TIMEOUT_S)
        self.socket.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )

    def leave(self) -> None:
        self.socket.close()


def in_flight(pair: Apart, server: LlmServer) -> int:
    found: int = pair.endpoints()[server.name]["in_flight"]
    return found


def test_a_client_that_leaves_during_prefill(pair: Apart) -> None:
    counted = Counted(pair.decode)
    with pair.prefill.frozen():
        client = Leaving(pair, 10)
        wait_until(lambda: in_flight(pair, pair.prefill) == 1, "it is prefilled")
        client.leave()
        wait_until(lambda: in_flight(pair, pair.prefill) == 0, "lbproxy has ended it")
    rest(pair)
    assert counted("vllm:prompt_tokens_total") == 0, "it was decoded"


def test_a_client_that_leaves_before_decode_begins(pair: Apart, found: Found) -> None:
    """The decode server reads the request when the client is gone, and has the prefill server free the blocks. Or it
    sees that before its engine has the request, which vLLM then ends (`with_cancellation`): the lease frees them.
    """
    expired = Counted(pair.prefill)
    with pair.decode.frozen():
        client = Leaving(pair, 11)
        wait_until(lambda: in_flight(pair, pair.decode) == 1, "it is prefilled")
        if pair.connector == "nixl":
            wait_until(lambda: pair.prefill.gauge("vllm:kv_cache_usage_perc") > 0, "prefill holds its blocks")
        client.leave()
        wait_until(lambda: in_flight(pair, pair.decode) == 0, "lbproxy has ended it")
    took_s = rest(pair)
    gone = expired("vllm:nixl_num_kv_expired_reqs_total")
    found(
        f"{pair.connector}: a client left before decode began: nothing is held after {took_s:.1f} s; "
        f"{gone:.0f} leases expired"
    )


def test_a_client_that_leaves_during_decode(pair: Apart) -> None:
    generated = Counted(pair.decode)
    client = Leaving(pair, 12, tokens=1500)
    assert client.socket.recv(1000)
    client.leave()
    rest(pair)
    assert 0 < generated("vllm:generation_tokens_total") < 1500


def test_clients_that_leave_at_any_moment(pair: Apart, found: Found) -> None:
    """Also between the legs: 160 of them, each a little later than the last."""
    expired, counted = Counted(pair.prefill), Counted(pair.decode)
    began = time.monotonic()
    whole = ask(pair.url, APIS["completions"], APIS["completions"].body(text(200, 13), 2))
    longest_s = 2 * (time.monotonic() - began)

    def come_and_go(number: int) -> None:
        client = Leaving(pair, 1000 + number)
        time.sleep(longest_s * number / 160)
        client.leave()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(come_and_go, range(160)))
    took_s = rest(pair)
    handed = counted.prompt_tokens("external_kv_transfer")
    gone = expired("vllm:nixl_num_kv_expired_reqs_total")
    share = handed / (160 * whole.prompt_tokens)
    found(
        f"{pair.connector}: 160 clients left after 0 to {longest_s:.2f} s: {share:.0%} of their prompts were handed "
        f"over; nothing is held {took_s:.1f} s later; {gone:.0f} leases expired"
    )
    # Prefill that ends while its client leaves holds its blocks for the lease: nobody has read where they are.
    assert gone <= 16
    assert ask(pair.url, APIS["completions"], APIS["completions"].body(text(200, 14), 2)).completion_tokens == 2


# --- Servers that are killed ------------------------------------------------------------------------------------------


PADDING = ": " + text(100, 15)


def killed_under_load(pair: Apart, server: LlmServer) -> tuple[Load, float]:
    """Requests of six workers, from before the server is killed to 60 requests later; and when it was killed."""
    with Load(pair.url, workers=6, max_tokens=TOKENS, padding=PADDING) as load:
        wait_until(lambda: len(load.results) >= 20, "it is under load")
        killed = time.monotonic()
        server.kill()
        wait_until(lambda: len(load.since(killed)) >= 60, "60 requests later")
    return load, killed


def test_a_prefill_server_that_is_killed_fails_no_request(pair: Apart, found: Found) -> None:
    load, _ = killed_under_load(pair, pair.prefill)
    slowest_s = max(one.seconds for one in load.results)
    found(f"{pair.connector}: prefill killed under load: {told(load.results)}; the slowest took {slowest_s:.1f} s")
    assert failures(load.results) == []
    rest_of_one(pair, pair.decode)
    works_again(pair)


def test_a_prefill_server_that_is_killed_when_it_has_handed_over(pair: Apart, found: Found) -> None:
    """What decode was to fetch is gone; it is computed anew."""
    api = APIS["chat"]
    prompts = [text(100, 200 + number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        with pair.decode.frozen():
            asked = [pool.submit(ask, pair.url, api, said(api, one, number)) for number, one in enumerate(prompts)]
            wait_until(lambda: in_flight(pair, pair.decode) == len(prompts), "all are prefilled")
            pair.prefill.kill()
        said_s = [(one.result(), time.monotonic() - began) for one in asked]
    took_s = max(seconds for _, seconds in said_s)
    found(
        f"{pair.connector}: prefill killed when it had handed over: {len(asked)} requests served after {took_s:.1f} s"
    )
    rest_of_one(pair, pair.decode)
    pair.bring_up()
    assert [without_cached(one) for one, _ in said_s] == [
        without_cached(ask(pair.prefill.url, api, api.body(one, TOKENS))) for one in prompts
    ]
    works_again(pair)


def said(api: Api, prompt: str, number: int) -> Fields:
    """Half of them streamed."""
    body = api.body(prompt, TOKENS)
    return streamed(api, body) if number % 2 else body


def test_a_decode_server_that_is_killed_fails_no_later_request(pair: Apart, found: Found) -> None:
    """Of those under way, streams that have begun break; no other."""
    load, killed = killed_under_load(pair, pair.decode)
    while ended_by_half_a_prompt(pair.prefill):
        found(f"{pair.connector}: prefill ended by itself, as it read what decode had half written when it was killed")
        pair.prefill.kill()
        pair.bring_up()
        load, killed = killed_under_load(pair, pair.decode)
    broken = failures([one for one in load.results if one.began < killed])
    found(
        f"{pair.connector}: decode killed under load: {told(load.since(killed))}; of those under way {len(broken)} "
        f"of 6 broke: {broken}"
    )
    assert failures(load.since(killed)) == []
    took_s = rest_of_one(pair, pair.prefill)
    found(f"{pair.connector}: decode killed: prefill holds nothing after {took_s:.1f} s")
    works_again(pair)


def ended_by_half_a_prompt(server: LlmServer) -> bool:
    """To vLLM's ExampleConnector a prompt is stored as soon as its folder exists, and both servers write. So a prompt
    that a killed server had begun to write ends the other one, of which lbproxy is no cause: docs/decisions/0041.
    """
    time.sleep(1.0)  # it takes a moment to end
    return server.fell and "FileNotFoundError: No such file" in server.log.read_text(errors="replace")


def rest_of_one(pair: Apart, server: LlmServer) -> float:
    """As `rest`, while the other server is dead."""
    began = time.monotonic()

    def idle() -> bool:
        page = server.page()
        return sum(sum_of(page, f"vllm:{name}") for name in GAUGES) == 0 and in_flight(pair, server) == 0

    wait_until(idle, f"{server.name} holds nothing", within_s=2 * LEASE_S)
    return time.monotonic() - began


def works_again(pair: Apart) -> None:
    """Once both are up, requests are split as before, and served without a further attempt."""
    pair.bring_up()
    counted = Counted(pair.decode)
    with Load(pair.url, workers=4, max_tokens=TOKENS, padding=PADDING) as load:
        wait_until(lambda: len(load.results) >= 20, "they are served again")
    assert failures(load.results) == []
    assert counted.prompt_tokens("external_kv_transfer") > 0
    rest(pair)
