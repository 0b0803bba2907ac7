# SPDX-License-Identifier: Apache-2.0
"""`lbproxy register`: when it asks whom again, and what it says of that."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import orjson
import pytest

from lbproxy.commands import register as module
from lbproxy.commands.cli import main
from lbproxy.commands.register import AGAIN_S, SPREAD, Renewals, read_entry
from lbproxy.config.text import ConfigError

URL = "http://lb:9901"


def renewals(every_s: float = 10.0) -> Renewals:
    return Renewals(URL, every_s, random.Random(1))


def test_failures_are_said_once_and_asked_again_more_and_more_rarely() -> None:
    one = renewals()
    steps = [one.failed("it is down") for _ in range(40)]
    assert [step.say for step in steps] == [f"{URL}: it is down; trying again", *[None] * 39]
    for number, step in enumerate(steps):
        longest = min(10.0, AGAIN_S * 2.0**number)
        assert SPREAD * longest <= step.wait_s <= longest
    assert one.name is None
    assert one.failed("another reason").say == f"{URL}: another reason; trying again"
    assert one.failed(f"{URL} cannot be reached").say == f"{URL} cannot be reached; trying again"


def test_success_is_said_once_and_again_after_a_failure() -> None:
    one = renewals()
    said = [one.succeeded("gpu").say, one.succeeded("gpu").say, one.failed("x").say, one.succeeded("gpu").say]
    assert said == [
        f"{URL}: registered gpu, renewed every 10 s",
        None,
        f"{URL}: x; trying again",
        f"{URL}: registered gpu, renewed every 10 s",
    ]
    step = one.failed("x")
    assert step.wait_s <= AGAIN_S, "a success ends the back-off"
    assert 9.0 <= one.succeeded("gpu").wait_s <= 10.0
    assert one.name == "gpu"


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("http://10.0.0.7:8000", {"url": "http://10.0.0.7:8000"}),
        ("unix:/run/vllm.sock", {"url": "unix:/run/vllm.sock"}),
        ("{url: 'http://a:1', name: gpu, weight: 2}", {"url": "http://a:1", "name": "gpu", "weight": 2}),
        ("url: http://a:1\nengine: vllm\n", {"url": "http://a:1", "engine": "vllm"}),
        ("{url: 'http://a:1', api_key: '${GPU_KEY}'}", {"url": "http://a:1", "api_key": "secret-of-gpu"}),
    ],
)
def test_an_endpoint_is_a_url_or_what_settings_say(
    text: str, entry: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_KEY", "secret-of-gpu")
    assert read_entry(text) == entry


@pytest.mark.parametrize(
    "text", ["", "5", "[http://a]", "{name: gpu}", "{url: 5}", "{", "{url: '${NO_SUCH_VARIABLE}'}"]
)
def test_what_is_none_is_refused_at_once(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError):
        read_entry(text)
    assert main(["register", text]) == 2
    assert "ENDPOINT" in capsys.readouterr().err


@pytest.mark.parametrize("every", ["0", "500ms", "2h", "x"])
def test_how_often_has_bounds(every: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(["register", "http://a:1", "--every", every])
    assert error.value.code == 2


# --- Before a listener ------------------------------------------------------------------------------------------------


class Lbproxy(BaseHTTPRequestHandler):
    """What an admin listener says to it."""

    answers: ClassVar[list[int]] = []
    """Statuses of what comes next; then 200."""
    asked: ClassVar[list[tuple[str, str, object, str | None]]] = []

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        sent = orjson.loads(body) if body else None
        self.asked.append((self.command, self.path, sent, self.headers.get("authorization")))
        status = self.answers.pop(0) if self.answers else 200
        said = {"name": "gpu"} if status < 400 else {"error": {"message": f"no, {status}", "code": "x"}}
        data = orjson.dumps(said)
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_DELETE = do_GET = _handle  # noqa: N815 - the library's names

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def listener(*answers: int) -> Iterator[str]:
    Lbproxy.answers[:], Lbproxy.asked[:] = answers, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lbproxy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def keep(url: str, until: Callable[[list[str]], bool], monkeypatch: pytest.MonkeyPatch) -> tuple[bool, list[str]]:
    """Register until something was said or asked. Returns whether it was removed, and what was said."""
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    said: list[str] = []
    stop, ended = threading.Event(), []

    def work() -> None:
        ended.append(module._keep(url, "token-of-the-test", {"url": "http://a:1"}, 1.0, stop, said.append))

    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + 60.0
    while not until(said) and time.monotonic() < end:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert until(said)
    return ended[0], said


def test_it_registers_renews_and_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(201) as url:
        removed, said = keep(url, lambda _: len(Lbproxy.asked) >= 2, monkeypatch)
        asked = list(Lbproxy.asked)
    assert removed
    assert said == [f"{url}: registered gpu, renewed every 1 s", f"{url}: removed gpu; what runs there finishes"]
    body = {"url": "http://a:1", "ttl": 3.0}
    bearer = "Bearer token-of-the-test"
    posts = [("POST", "/admin/endpoints", body, bearer)] * (len(asked) - 1)
    assert asked == [*posts, ("DELETE", "/admin/endpoints/gpu?url=http%3A%2F%2Fa%3A1", None, bearer)]


def test_a_conflict_and_a_refusal_are_said_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(409, 409, 422, 503, 401) as url:
        removed, said = keep(url, lambda said: any("registered" in line for line in said), monkeypatch)
    assert removed
    assert said[:4] == [f"{url}: no, {status}; trying again" for status in (409, 422, 503)] + [
        f"{url}: no, 401 (set it in LBPROXY_ADMIN_TOKEN); trying again"
    ]


def test_an_lbproxy_that_is_not_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener() as url:
        pass
    removed, said = keep(url, bool, monkeypatch)
    assert removed, "there was nothing to remove"
    (line,) = said
    assert "cannot be reached" in line


def test_that_another_has_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(201) as url:

        def registered(said: list[str]) -> bool:
            if said:
                Lbproxy.answers[:] = [409] * 3
            return bool(said)

        removed, said = keep(url, registered, monkeypatch)
    assert removed
    assert said[-1].startswith(f"{url}: gpu is not this one any more: no, 409")


def test_what_cannot_be_removed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(201) as url:

        def registered(said: list[str]) -> bool:
            if said:
                Lbproxy.answers[:] = [500] * 3
            return bool(said)

        removed, said = keep(url, registered, monkeypatch)
    assert not removed
    assert "cannot be removed, so it stays until its lease ends: no, 500" in said[-1]
