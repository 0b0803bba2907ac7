# SPDX-License-Identifier: Apache-2.0
"""The product as installed: commands in processes, the openai SDK as the client, simulated servers behind."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.support.aio import run, until
from tests.support.ports import free_port
from tests.support.process import Process, lbproxy, mock


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


def gauge(admin: str, name: str) -> dict[str, float]:
    """The samples of a family on lbproxy's own metrics page, by their labels."""
    page = httpx.get(f"{admin}/metrics").text
    samples = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith(name)]
    return {labels.removeprefix(name): float(value) for labels, value in samples}


@pytest.fixture(scope="module")
def fleet() -> Iterator[list[str]]:
    """Two simulated servers."""
    with mock("--model", "sim", "--speed", "4") as (_, one), mock("--model", "sim", "--speed", "4") as (_, two):
        yield [one, two]


@pytest.fixture(scope="module")
def product(fleet: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, str, str]]:
    with lbproxy(tmp_path_factory.mktemp("lbproxy"), fleet) as running:
        yield running


@pytest.fixture(scope="module")
def client(product: tuple[Process, str, str]) -> Iterator[OpenAI]:
    with client_of(product[1]) as client:
        yield client


MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me something."}]


def test_chat_and_completions_streamed_and_whole(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["sim"]
    chat = client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=12)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 12
    chunks = list(
        client.chat.completions.create(
            model="sim", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    whole = client.completions.create(model="sim", prompt="Once", max_tokens=5)
    pieces = list(client.completions.create(model="sim", prompt="Once", max_tokens=5, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    embedding = client.embeddings.create(model="sim", input="x", encoding_format="float")
    assert embedding.data[0].embedding


def test_errors_are_the_sdks_typed_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="sim", prompt="x", max_tokens=-1)


def test_requests_spread_and_are_told_apart(client: OpenAI, fleet: list[str]) -> None:
    names = set()
    threads = [
        threading.Thread(
            target=lambda: names.add(
                client.completions.with_raw_response.create(model="sim", prompt="x", max_tokens=50).headers[
                    "x-lbproxy-endpoint"
                ]
            )
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == {url.removeprefix("http://") for url in fleet}


def test_metrics_and_probes(product: tuple[Process, str, str], client: OpenAI) -> None:
    _, url, admin = product
    client.completions.create(model="sim", prompt="x", max_tokens=1)
    assert httpx.get(f"{admin}/healthz").status_code == 200
    ready = httpx.get(f"{admin}/readyz")
    assert (ready.status_code, ready.json()["endpoints"]["up"]) == (200, 2)
    run(until(lambda: len(gauge(admin, "lbproxy_endpoint_kv_utilization{")) == 2, "both were scraped"))
    missing = gauge(admin, "lbproxy_scrape_missing_metrics{")
    assert len(missing) == 10
    assert set(missing.values()) == {0.0}
    assert sum(gauge(admin, "lbproxy_requests_total{").values()) >= 1
    assert httpx.get(f"{url}/metrics").status_code == 404, "not on the clients' listener"


def test_every_request_leaves_one_log_line(product: tuple[Process, str, str]) -> None:
    process, url, _ = product
    ids = [f"log-{n}" for n in range(3)]
    for request_id, body in zip(ids, ({"model": "sim", "prompt": "secret"}, {"model": "no"}, {}), strict=True):
        httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": request_id})
    run(until(lambda: process.read().count('"id":"log-') == 3, "three lines"))
    lines = [line for line in process.lines("request") if line["id"] in ids]
    assert len(lines) == 3
    assert {line["id"]: line["status"] for line in lines} == dict(zip(ids, (200, 404, 400), strict=True))
    assert "secret" not in process.read()


def test_a_client_that_leaves_ends_the_work_in_the_engine(product: tuple[Process, str, str], fleet: list[str]) -> None:
    """The simulated engine's own gauge drops, for a stream and for a whole answer."""
    _, url, admin = product

    def running() -> float:
        pages = [httpx.get(f"{one}/metrics").text for one in fleet]
        lines = [line for page in pages for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    for stream in (True, False):
        body = json.dumps({"model": "sim", "prompt": "x", "max_tokens": 20_000, "ignore_eos": True, "stream": stream})
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            run(until(lambda: running() == 1, "running"))
        run(until(lambda: running() == 0, "it stopped"))
        run(until(lambda: sum(gauge(admin, "lbproxy_endpoint_in_flight{").values()) == 0, "nothing in flight"))


def test_a_dead_server_is_not_noticed_by_clients(tmp_path: Path) -> None:
    """kill -9 one of two; lbproxy started with a third that never lived."""
    with (
        mock() as (first, one),
        mock() as (_, two),
        lbproxy(tmp_path, [one, two, "http://127.0.0.1:9"]) as (_, url, admin),
        client_of(url) as client,
    ):
        client.completions.create(model="sim", prompt="x", max_tokens=2)
        first.process.kill()
        for _ in range(20):
            answer = client.completions.with_raw_response.create(model="sim", prompt="x", max_tokens=2)
            assert answer.headers["x-lbproxy-endpoint"] == two.removeprefix("http://")
        run(until(lambda: list(gauge(admin, "lbproxy_endpoint_up{").values()) == [0.0, 1.0, 0.0], "it is seen as down"))


def test_it_starts_before_its_servers_and_finds_them(tmp_path: Path) -> None:
    port = free_port()
    with lbproxy(tmp_path, [f"http://127.0.0.1:{port}"]) as (_, url, admin):
        run(until(lambda: httpx.get(f"{admin}/readyz").status_code == 503, "not ready"))
        refused = httpx.post(f"{url}/v1/completions", json={"model": "sim", "prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_endpoints")
        assert 1 <= int(refused.headers["retry-after"]) <= 5
        with mock("--port", str(port)), client_of(url) as client:
            run(until(lambda: httpx.get(f"{admin}/readyz").status_code == 200, "ready"))
            assert client.completions.create(model="sim", prompt="x", max_tokens=1)


def test_sigterm_lets_a_running_stream_finish(fleet: list[str], tmp_path: Path) -> None:
    with lbproxy(tmp_path, fleet) as (process, url, _), client_of(url) as client:
        stream = client.completions.create(model="sim", prompt="x", max_tokens=300, stream=True)
        pieces = [next(stream)]
        process.process.send_signal(signal.SIGTERM)
        pieces += list(stream)
        assert pieces[-1].choices[0].finish_reason == "length"
        assert process.process.wait(20) == 0
        assert "Traceback" not in process.read()


def test_settings_that_are_wrong_are_told_all_at_once(tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("endpoints: [gpu-1]\nrouting: {polcy: x}\nlisten: 5\n")
    with Process("--config", str(config)) as process:
        assert process.process.wait(20) == 2
        output = process.read()
    for text in ("endpoints[0]", "got 'gpu-1'", "routing.polcy: unknown key, did you mean policy?", "listen"):
        assert text in output
    assert "Traceback" not in output


def test_an_address_in_use_is_said_in_one_line(fleet: list[str], tmp_path: Path) -> None:
    taken = fleet[0].removeprefix("http://")
    config = tmp_path / "cfg.yaml"
    config.write_text(f"listen: {taken}\nadmin: null\nendpoints: ['{fleet[1]}']\n")
    with Process("--config", str(config)) as process:
        assert process.process.wait(20) == 1
        assert "in use" in process.read()
        assert "Traceback" not in process.read()


def test_check_dials_and_tells(fleet: list[str], tmp_path: Path) -> None:
    config = tmp_path / "cfg.yaml"
    config.write_text(f"endpoints: ['{fleet[0]}', 'http://127.0.0.1:9']\n")
    with Process("check", "--config", str(config)) as process:
        assert process.process.wait(20) == 0
        output = process.read()
    assert "1 of 2 endpoints can be used" in output
    assert "vllm" in output
    assert "5 of 5" in output
    config.write_text("endpoints: ['http://127.0.0.1:9']\n")
    with Process("check", "--config", str(config)) as process:
        assert process.process.wait(20) == 1


def test_no_servers_output_reaches_the_wrong_place() -> None:
    with Process("mock", "--speed", "0") as process:
        assert process.process.wait(20) == 2
    with Process() as process:
        assert process.process.wait(20) == 2
        assert "lbproxy demo" in process.read()


def test_load_reports_come_with_answers_and_stay_here(
    product: tuple[Process, str, str], fleet: list[str], client: OpenAI
) -> None:
    """The simulated servers are recognised as vLLM and asked; a client sees a report only if it asks itself."""
    _, url, admin = product

    def whole(**headers: str) -> httpx.Response:
        fields = {"model": "sim", "messages": MESSAGES, "max_tokens": 2}
        return httpx.post(f"{url}/v1/chat/completions", json=fields, headers=headers, timeout=30)

    def reports() -> float:
        samples = gauge(admin, "lbproxy_load_reports_total")
        assert not any(value for labels, value in samples.items() if "malformed" in labels)
        return sum(samples.values())

    run(until(lambda: "endpoint-load-metrics" not in whole().headers and reports() > 0, "a report came"))
    before = reports()
    assert whole(**{"endpoint-load-metrics-format": "JSON"}).headers["endpoint-load-metrics"].startswith("JSON {")
    assert reports() == before + 1
