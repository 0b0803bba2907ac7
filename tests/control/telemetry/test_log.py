# SPDX-License-Identifier: Apache-2.0
"""The log: every line is one JSON object whatever stands in it, and nobody waits for whoever reads it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from aiohttp.http_exceptions import BadStatusLine
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.control.telemetry import access_line as lines_of
from lbproxy.control.telemetry import writer as writer_module
from lbproxy.control.telemetry.access_line import access_line, plain, stamp
from lbproxy.control.telemetry.log import (
    ENDPOINT_LINE_EVERY_S,
    ENDPOINT_LINES,
    MAX_QUOTAS,
    LineHandler,
    configure_logging,
)
from lbproxy.control.telemetry.writer import MAX_LINES, LineWriter
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.requests.outcome import Outcome
from lbproxy.core.requests.request import Usage

HOSTILE = [
    'quote " backslash \\ line\nfeed\r\n{"event":"request"}',
    "".join(map(chr, range(32))) + "\x7f\x80\u2028",
    "lone \udc80 surrogate \ud800",
    "\U0001f600" * 300,
    "x" * (1 << 20),
    "\udcff" * (1 << 20),
    "",
]


class Reader:
    """The other end of a pipe, read to its end by a thread."""

    def __init__(self) -> None:
        self._reading, self.fd = os.pipe()
        self.data = b""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while piece := os.read(self._reading, 1 << 16):
            self.data += piece
        os.close(self._reading)

    def lines(self) -> list[bytes]:
        """Everything that was written; closes the writing end."""
        os.close(self.fd)
        self._thread.join()
        return self.data.splitlines(keepends=True)


@contextmanager
def logging_to(writer: LineWriter, level: str = "info") -> Iterator[LineHandler]:
    handler = configure_logging(level, writer)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger("lbproxy").setLevel(logging.NOTSET)


def logged(
    write: logging.Logger, *calls: tuple[int, str, dict[str, object]], level: str = "info"
) -> list[dict[str, object]]:
    """The lines that these calls of `Logger.log` leave, read as JSON."""
    reader = Reader()
    writer = LineWriter(reader.fd)
    with logging_to(writer, level):
        for severity, message, options in calls:
            write.log(severity, message, **options)  # type: ignore[arg-type]
    writer.close()
    return [json.loads(line) for line in reader.lines()]


def record(**differs: object) -> RequestRecord:
    one = RequestRecord("id-1", "POST", "/v1/completions", "10.0.0.9", 100.0)
    one.ended_at = 101.5
    for name, value in differs.items():
        setattr(one, name, value)
    return one


# --- Lines ------------------------------------------------------------------------------------------------------------


def test_an_access_line_says_what_happened() -> None:
    done = record(
        model="m",
        stream=True,
        endpoint="gpu-1",
        status=200,
        outcome=Outcome.COMPLETED,
        attempts=2,
        request_bytes=10,
        response_bytes=200,
        events=7,
        placed_at=100.25,
        queue_s=0.25,
        first_byte_at=100.5,
    )
    line = json.loads(access_line(done, lines_of.now()))
    when = datetime.fromisoformat(line.pop("time"))
    assert when.utcoffset() == timedelta(0)
    assert line == {
        "level": "info",
        "event": "request",
        "id": "id-1",
        "client": "10.0.0.9",
        "method": "POST",
        "path": "/v1/completions",
        "model": "m",
        "stream": True,
        "endpoint": "gpu-1",
        "status": 200,
        "outcome": "completed",
        "attempts": 2,
        "request_bytes": 10,
        "response_bytes": 200,
        "events": 7,
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": None,
        "queue_ms": 250.0,
        "ttfb_ms": 500.0,
        "duration_ms": 1500.0,
    }


def test_an_access_line_says_what_the_endpoint_reported_of_tokens() -> None:
    line = json.loads(access_line(record(usage=Usage(1200, None, 30)), lines_of.now()))
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (1200, None, 30)
    split = record(usage=Usage(1200, 1200, 30), prefill="gpu-2", prefill_usage=Usage(1200, 800, 1))
    assert json.loads(access_line(split, lines_of.now()))["cached_tokens"] == 800


def test_a_split_request_names_where_its_prompt_was_computed() -> None:
    split = {"prefill": "gpu-1", "endpoint": "gpu-2", "outcome": Outcome.COMPLETED}
    line = json.loads(access_line(record(**split, prefill_s=0.1234), lines_of.now()))
    assert (line["prefill"], line["endpoint"], line["prefill_ms"]) == ("gpu-1", "gpu-2", 123.4)
    line = json.loads(access_line(record(**split, key="k"), lines_of.now()))
    assert (line["prefill"], line["prefill_ms"]) == ("gpu-1", None), "it failed, or was not over"
    hostile = json.loads(access_line(record(**split | {"prefill": 'a"\n\u20ac'}), lines_of.now()))
    assert hostile["prefill"].startswith('a"')


def test_a_request_that_was_never_placed_has_no_times_of_an_endpoint() -> None:
    line = json.loads(access_line(record(outcome=Outcome.CLIENT_CLOSED, error="gone"), lines_of.now()))
    assert line["queue_ms"] is None
    assert line["ttfb_ms"] is None
    assert line["endpoint"] is None
    assert line["status"] == 499, "the outcome's, since nothing was sent"
    assert line["error"] == "gone"


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_string_stays_inside_its_field(text: str) -> None:
    """Neither a forged line, nor bytes that the log's reader cannot decode, nor a megabyte."""
    line = access_line(
        record(
            method=text, path=f"/{text}", client=text, model=text, key=text, alias=text, fallback_from=text, error=text
        ),
        lines_of.now(),
    )
    assert line.count(b"\n") == 1
    assert line.endswith(b"}\n")
    assert line.isascii()
    assert len(line) < 16 << 10
    assert json.loads(line)["event"] == "request"


@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_any_string_makes_a_line(path: str, model: str) -> None:
    line = json.loads(access_line(record(path=path, model=model), lines_of.now()))
    assert len(line["path"]) <= 512
    assert line["model"] == plain(model, 256)


def test_the_query_is_not_logged() -> None:
    """Some clients put their key there."""
    assert b"sk-secret" not in access_line(record(path="/v1/models?api_key=sk-secret"), lines_of.now())


@given(st.floats(0, 4e9))
def test_stamps_are_rfc_3339_to_the_millisecond(at: float) -> None:
    text = stamp(at)
    assert text.endswith("Z")
    assert abs(datetime.fromisoformat(text).timestamp() - at) < 0.0011


# --- Loggers ----------------------------------------------------------------------------------------------------------


def test_a_log_call_becomes_one_json_line() -> None:
    options: dict[str, object] = {"extra": {"event": "transition", "endpoint": "gpu-1", "to": "down"}}
    (line,) = logged(logging.getLogger("lbproxy"), (logging.WARNING, "gpu-1\nis \udc80 down", options))
    del line["time"]
    assert line == {
        "level": "warning",
        "event": "transition",
        "message": "gpu-1\nis \udc80 down",
        "endpoint": "gpu-1",
        "to": "down",
    }


def test_levels_are_obeyed_and_other_loggers_warn() -> None:
    ours = logging.getLogger("lbproxy")
    lines = logged(ours, (logging.INFO, "quiet", {}), (logging.WARNING, "loud", {}), level="warning")
    assert [line["message"] for line in lines] == ["loud"]
    lines = logged(logging.getLogger("asyncio"), (logging.INFO, "quiet", {}), (logging.ERROR, "lost", {}))
    assert [(line["logger"], line["message"]) for line in lines] == [("asyncio", "lost")]


def test_a_defect_is_logged_with_its_traceback_and_counted() -> None:
    reader = Reader()
    writer = LineWriter(reader.fd)
    with logging_to(writer) as handler:
        try:
            _ = 1 / 0
        except ZeroDivisionError:
            logging.getLogger("lbproxy").exception("scraper failed")
        assert handler.internal_errors == 1
    writer.close()
    (line,) = map(json.loads, reader.lines())
    assert "ZeroDivisionError" in line["traceback"]


def test_garbage_from_clients_neither_floods_the_log_nor_shows_in_it() -> None:
    """aiohttp logs each malformed request with a traceback that quotes it."""
    error = BadStatusLine("Authorization: sk-secret")
    reader = Reader()
    writer = LineWriter(reader.fd)
    with logging_to(writer) as handler:
        for _ in range(1000):
            logging.getLogger("aiohttp.server").error("Error handling request", exc_info=error)
        assert handler.internal_errors == 0
    writer.close()
    lines = reader.lines()
    assert 1 <= len(lines) < 100
    assert b"sk-secret" not in b"".join(lines)
    assert json.loads(lines[0])["error"] == "BadStatusLine"


def test_configuring_again_replaces_the_handler() -> None:
    """A reload of the settings must not double every line."""
    reader = Reader()
    writer = LineWriter(reader.fd)
    with logging_to(writer), logging_to(writer):
        logging.getLogger("lbproxy").warning("once")
    writer.close()
    assert len(reader.lines()) == 1


# --- The writer -------------------------------------------------------------------------------------------------------


def test_lines_come_out_whole_and_in_order() -> None:
    reader = Reader()
    writer = LineWriter(reader.fd)
    lines = [b"%d\n" % n for n in range(10_000)]
    for line in lines:
        writer.write([line])
    writer.close(timeout_s=30.0)
    assert reader.lines() == lines
    assert writer.dropped == 0


def test_lines_come_out_without_close() -> None:
    reading, fd = os.pipe()
    writer = LineWriter(fd)
    for n in range(3):  # each time the thread has gone to sleep again, or not: none may be forgotten
        writer.write([b"line %d\n" % n])
        assert os.read(reading, 100) == b"line %d\n" % n
    writer.close()
    os.close(fd)
    os.close(reading)


def test_a_reader_that_takes_nothing_costs_lines_and_no_time() -> None:
    """A full pipe blocks its writer: that must be the thread, never the event loop."""
    reading, fd = os.pipe()
    writer = LineWriter(fd)
    for _ in range(2 * MAX_LINES):
        writer.write([b"x" * 99 + b"\n"])
    assert writer.dropped > 0
    writer.close(timeout_s=0.01)
    os.close(reading)  # EPIPE lets the thread go
    writer.close(timeout_s=30.0)
    os.close(fd)
    assert writer.dropped > MAX_LINES


def test_a_non_blocking_output_loses_nothing() -> None:
    """Standard output may be shared with a program that made it so."""
    reader = Reader()
    os.set_blocking(reader.fd, False)
    writer = LineWriter(reader.fd)
    lines = [b"x" * 999 + b"\n"] * 2000
    for line in lines:
        writer.write([line])
    writer.close(timeout_s=30.0)
    assert reader.lines() == lines


def test_a_broken_pipe_is_counted_and_survived() -> None:
    reading, fd = os.pipe()
    os.close(reading)
    writer = LineWriter(fd)
    for _ in range(10):
        writer.write([b"lost\n"])
    writer.close(timeout_s=30.0)
    os.close(fd)
    assert writer.dropped == 10
    writer.write([b"too late\n"])
    assert writer.dropped == 11


def test_lines_that_wait_for_a_slow_reader_take_what_they_weigh() -> None:
    """A full queue of orjson's own results would take 128 MB instead of 8."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    lines = [access_line(record(), lines_of.now()) for _ in range(MAX_LINES)]
    assert resident_bytes() - before < 10 * sum(map(len, lines))


# --- Several processes ------------------------------------------------------------------------------------------------


WRITING = """
import sys
from lbproxy.control.telemetry.writer import LineWriter
writer = LineWriter(1, shared=True)
for _ in range(8):
    writer.write([sys.argv[1].encode() * 400 + b"\\n"] * 256)
writer.close(timeout_s=30.0)
"""
"""What one process does: batches of lines that are larger than what a pipe holds."""


def test_processes_that_share_a_pipe_do_not_mix_their_lines() -> None:
    """Without the lock they do: of a batch a pipe takes what it has room for, and then another's may follow."""
    reading, fd = os.pipe()
    writers = [subprocess.Popen([sys.executable, "-c", WRITING, name], stdout=fd) for name in "abc"]
    os.close(fd)
    data = b""
    while piece := os.read(reading, 1 << 12):
        data += piece
    os.close(reading)
    for one in writers:
        assert one.wait() == 0
    lines = data.splitlines()
    assert len(lines) == 3 * 8 * 256
    assert all(len(line) == 400 and len(set(line)) == 1 for line in lines)


HOLDING = "import fcntl, time; fcntl.lockf(1, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"


def test_a_process_that_is_stopped_while_it_writes_does_not_silence_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "LOCKED_S", 0.05)
    reader = Reader()
    with subprocess.Popen([sys.executable, "-c", HOLDING], stdout=reader.fd) as holding:
        while reader.data != b"\n":
            time.sleep(0.01)
        writer = LineWriter(reader.fd, shared=True)
        writer.write([b"line\n"])
        writer.close(timeout_s=30.0)
        holding.kill()
    assert reader.lines() == [b"\n", b"line\n"]
    assert writer.dropped == 0


def test_a_place_without_locks_is_written_to_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    reader = Reader()
    writer = LineWriter(reader.fd, shared=True)
    writer.write([b"line\n"])
    writer.close(timeout_s=30.0)
    assert reader.lines() == [b"line\n"]


def test_an_endpoint_cannot_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes each time it is asked: its ranks, models, health, metrics."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    written: list[dict[str, object]] = []

    class Writer(LineWriter):
        def __init__(self) -> None: ...

        def write(self, lines: list[bytes]) -> None:
            written.extend(json.loads(one) for one in lines)

    handler = LineHandler(Writer())

    def emit(endpoint: str, event: str = "models", level: int = logging.INFO) -> None:
        fields = {"msg": "it changed", "levelno": level, "levelname": "INFO", "endpoint": endpoint, "event": event}
        handler.emit(logging.makeLogRecord({"name": "lbproxy", **fields}))

    for _ in range(1000):
        emit("e1")
        clock[0] += 0.1
    assert abs(len(written) - ENDPOINT_LINES - 100 / ENDPOINT_LINE_EVERY_S) <= 1
    assert sum(int(str(one.get("suppressed", 0))) for one in written) >= 1000 - len(written) - 50
    for name, event, level in (("e2", "models", 20), ("e1", "transition", 20), ("e1", "models", logging.ERROR)):
        before = len(written)
        emit(name, event, level)
        assert len(written) == before + 1, "of others, of something else, and of our own faults each line is written"
    for n in range(2 * MAX_QUOTAS):
        emit(f"e{n}")
    assert len(handler._quotas) == MAX_QUOTAS
