# SPDX-License-Identifier: Apache-2.0
"""Load reports in the headers of answers, through sockets: asked for, believed at once, and kept from clients."""

from __future__ import annotations

import base64

import pytest

from lbproxy.core.engines.load_metrics import LoadMetrics
from tests.support.aio import run
from tests.support.endpoint import LAST, STREAM_HEAD, Received, ScriptedEndpoint, Wire, answer, chunk, event
from tests.support.rig import Reply, Rig, post, rig

FORMAT = "endpoint-load-metrics-format"
REPORT = "endpoint-load-metrics"
TEXT = "TEXT named_metrics.num_requests_waiting=7.0, named_metrics.kv_cache_usage_perc=0.25"


def reporting(report: str, name: str = REPORT, status: int = 200) -> bytes:
    return answer(status=status, more=f"{name}: {report}\r\nX-Theirs: 1\r\n")


class Server:
    """vLLM as far as this matters: an answer that is no stream says how long the queue is, if it is asked to."""

    queue = 0

    async def serve(self, wire: Wire, request: Received) -> None:
        form = request.field(FORMAT)
        report = f"named_metrics.num_requests_waiting={self.queue}.0, named_metrics.kv_cache_usage_perc=0.5"
        await wire.send(answer() if form is None else reporting(f"{form} {report}"))


def show_idle(it: Rig) -> None:
    """The one scrape of each endpoint, by which it is known to be vLLM."""
    for endpoint in it.endpoints:
        it.runtime.balancer.scrape_sent(endpoint.uid)
        idle = LoadMetrics(scraped_at=it.runtime.now(), waiting=0.0, running=0.0, kv_utilization=0.5)
        it.runtime.report_scrape(endpoint.uid, idle)
        it.runtime.balancer.endpoints.ask_load(endpoint.uid, True)


@pytest.mark.parametrize(
    "routing",
    ["adaptive", "least-request", "gie", "gie-tree", "weighted, scorers: {queue: 1}"],
)
def test_with_scrapes_every_5_s_a_change_is_acted_on_at_the_next_response(routing: str) -> None:
    """No scrape comes in this test: what moves the requests is what answers say."""
    settings = f"routing: {{policy: {routing}}}\nscrape: {{interval: 5s, stale_after: 15s}}"

    async def main() -> None:
        one, two = Server(), Server()
        async with ScriptedEndpoint(one.serve) as e1, ScriptedEndpoint(two.serve) as e2:
            await moved(one, two, e1.url, e2.url)

    async def moved(one: Server, two: Server, *urls: str) -> None:
        async with rig(*urls, more=settings) as it:
            show_idle(it)

            async def name() -> str:
                return (await it.ask(post())).field("x-lbproxy-endpoint") or "none"

            names: list[str] = []
            while len(set(names)) < 2 or len(names) < 10:
                names.append(await name())
                assert len(names) < 100, "both are idle"
            # They take turns; but on a busy machine one of them may have been slow, and gets no request any more.
            servers, busy = {"e1": one, "e2": two}, names[-1]
            servers[busy].queue = 8
            while (chosen := await name()) != busy:
                if chosen == names[-1]:
                    servers[busy].queue, servers[chosen].queue, busy = 0, 8, chosen
                names.append(chosen)
                assert len(names) < 1000, "one of them is the best"
            other = "e2" if busy == "e1" else "e1"
            assert [await name() for _ in range(20)] == [other] * 20
            servers[other].queue = 40_000  # by far: what adaptive learned of their speed depends on the machine
            assert [await name(), await name()] == [other, busy]

    run(main())


async def asked(it: Rig, endpoint: ScriptedEndpoint, more: str = "") -> tuple[Reply, str | None]:
    """The answer to a request, and in which form the endpoint was asked for its load."""
    reply = await it.ask(post(more=more))
    return reply, endpoint.requests[-1].field(FORMAT)


@pytest.mark.parametrize(
    ("name", "report"),
    [
        (REPORT, TEXT),
        ("Endpoint-Load-Metrics", TEXT),
        (REPORT, 'JSON {"named_metrics": {"num_requests_waiting": 7, "kv_cache_usage_perc": 0.25}}'),
        (
            f"{REPORT}-bin",
            base64.b64encode(
                bytes.fromhex("421f0a146e756d5f72657175657374735f77616974696e6711") + b"\0" * 6 + b"\x1c\x40"
            ).decode(),
        ),
    ],
    ids=["text", "case", "json", "bin"],
)
def test_a_report_is_used_and_kept_from_the_client(name: str, report: str) -> None:
    async def main() -> None:
        async with ScriptedEndpoint(reporting(report, name)) as endpoint, rig(endpoint.url) as it:
            it.runtime.balancer.endpoints.ask_load(it.endpoints[0].uid, True)
            reply, form = await asked(it, endpoint)
            assert form == "TEXT"
            assert (reply.field(name), reply.field("x-theirs")) == (None, "1")
            seen = it.seen()
            assert seen.metrics is not None
            assert seen.metrics.waiting == 7.0
            assert (seen.load_reports, seen.malformed_reports, seen.stale) == (1, 0, False)

    run(main())


@pytest.mark.parametrize("asks", [True, False])
def test_a_client_that_asks_itself_gets_what_it_asked_for(asks: bool) -> None:
    """In its form, and we read it too; nothing is asked for twice."""

    async def main() -> None:
        async with ScriptedEndpoint(reporting("JSON {}")) as endpoint, rig(endpoint.url) as it:
            it.runtime.balancer.endpoints.ask_load(it.endpoints[0].uid, asks)
            reply, form = await asked(it, endpoint, f"{FORMAT}: JSON\r\n")
            assert (reply.field(REPORT), form) == ("JSON {}", "JSON")
            assert endpoint.requests[-1].head.lower().count(FORMAT.encode()) == 1
            assert it.seen().load_reports == 1

    run(main())


def test_who_is_not_to_be_asked_is_not_asked() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as endpoint, rig(endpoint.url) as it:
            assert (await asked(it, endpoint))[1] is None
            uid = it.endpoints[0].uid
            it.runtime.balancer.endpoints.ask_load(uid, True)
            assert (await asked(it, endpoint))[1] == "TEXT"
            it.runtime.balancer.endpoints.ask_load(uid, False)
            assert (await asked(it, endpoint))[1] is None
            assert it.seen().load_reports == 0

    run(main())


@pytest.mark.parametrize(
    "report",
    ["", "XML", "TEXT a", "TEXT a=1,a=1", "JSON {", "BIN !", "TEXT named_metrics.a=" + "9" * 9000, "\xff\xfe"],
)
def test_a_malformed_report_is_counted_and_harms_nothing(report: str) -> None:
    async def main() -> None:
        head, _, body = reporting("@").partition(b"\r\n\r\n")
        bad = head.replace(b"@", report.encode("latin-1")) + b"\r\n\r\n" + body
        async with ScriptedEndpoint(bad) as endpoint, rig(endpoint.url) as it:
            it.runtime.balancer.endpoints.ask_load(it.endpoints[0].uid, True)
            reply, _ = await asked(it, endpoint)
            assert (reply.status, reply.body, reply.field(REPORT)) == (200, b'{"ok":true}', None)
            seen = it.seen()
            assert (seen.load_reports, seen.malformed_reports, seen.metrics) == (0, 1, None)

    run(main())


def test_of_two_reports_the_first_counts() -> None:
    async def main() -> None:
        two = answer(more=f"{REPORT}: {TEXT}\r\n{REPORT}: TEXT named_metrics.num_requests_waiting=9\r\n")
        async with ScriptedEndpoint(two) as endpoint, rig(endpoint.url) as it:
            reply, _ = await asked(it, endpoint)
            assert reply.field(REPORT) is None
            metrics = it.seen().metrics
            assert metrics is not None
            assert metrics.waiting == 7.0

    run(main())


def test_a_report_before_a_stream_counts_too() -> None:
    """vLLM does not send one; another engine may."""

    async def main() -> None:
        head = STREAM_HEAD[:-2] + f"{REPORT}: {TEXT}\r\n\r\n".encode()
        stream = head + event("1") + chunk(b"data: [DONE]\n\n") + LAST
        async with ScriptedEndpoint(stream) as endpoint, rig(endpoint.url) as it:
            reply = await it.ask(post(b'{"model":"m","stream":true}'))
            assert reply.field(REPORT) is None
            assert b"[DONE]" in reply.body
            assert it.seen().load_reports == 1

    run(main())


def test_a_report_with_an_answer_that_is_not_passed_on_counts_too() -> None:
    async def main() -> None:
        async with (
            ScriptedEndpoint(reporting(TEXT, status=503)) as busy,
            ScriptedEndpoint() as free,
            rig(busy.url, free.url) as it,
        ):
            for _ in range(20):
                if (await it.ask(post())).field("x-lbproxy-attempts") == "2":
                    break
            metrics = it.seen("e1").metrics
            assert metrics is not None
            assert metrics.waiting == 7.0

    run(main())
