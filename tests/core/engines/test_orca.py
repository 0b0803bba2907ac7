# SPDX-License-Identifier: Apache-2.0
"""Load reports in response headers: real ones are read, broken ones are told apart, hostile ones cost nothing."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.core.engines.orca import MAX_REPORT_BYTES, RESPONSE_HEADERS, LoadReport, read_field, read_report

RECORDED = Path(__file__).parents[2] / "fixtures" / "http" / "vllm-0.32.0"


def header(name: str) -> bytes | None:
    """The load report in a recorded response."""
    lines = (RECORDED / f"{name}.response.http").read_bytes().partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]
    fields = {key.lower(): value for key, _, value in (line.partition(b": ") for line in lines)}
    return fields.get(RESPONSE_HEADERS[0])


@pytest.mark.parametrize("name", ["orca-text-completion", "orca-json-chat"])
def test_recorded_report(name: str) -> None:
    value = header(name)
    assert value is not None
    assert read_report(value) == LoadReport(waiting=0.0, kv_utilization=0.0)


@pytest.mark.parametrize("name", ["orca-text-stream", "orca-text-on-error", "orca-bin"])
def test_vllm_reports_only_with_whole_good_answers_and_not_in_binary(name: str) -> None:
    """So scrapes cannot be left out altogether."""
    assert header(name) is None


BUSY = LoadReport(waiting=7.0, kv_utilization=0.4)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=7", BUSY),
        (b"text named_metrics.kv_cache_usage_perc=.4,named_metrics.num_requests_waiting=7e0", BUSY),
        (b" TEXT  eps=0.9 , named_metrics.kv_cache_usage_perc = 0.4,named_metrics.num_requests_waiting=7 ", BUSY),
        (b'JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 7}, "eps": 1}', BUSY),
        (b'JSON: {"namedMetrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 7, "other": -1}}', BUSY),
        (b"TEXT named_metrics.num_requests_running=3", LoadReport(running=3.0)),
        (b"TEXT cpu_utilization=0.4", LoadReport()),
        (b"TEXT kv_cache_usage_perc=0.4", LoadReport()),
        (b"JSON {}", LoadReport()),
        (b"TEXT", LoadReport()),
        (b"TEXT ", LoadReport()),
    ],
)
def test_forms(value: bytes, expected: LoadReport) -> None:
    assert read_report(value) == expected


@pytest.mark.parametrize(
    ("number", "waiting", "share"),
    [("0", 0.0, 0.0), ("1.5", 1.5, 1.0), ("1e9", 1e9, 1.0), ("-1", None, None), ("1e10", None, None)],
)
def test_what_is_out_of_range_is_unknown(number: str, waiting: float | None, share: float | None) -> None:
    text = f"TEXT named_metrics.num_requests_waiting={number}, named_metrics.kv_cache_usage_perc={number}"
    assert read_report(text.encode()) == LoadReport(waiting=waiting, kv_utilization=share)


def test_nan_is_unknown() -> None:
    assert (
        read_report(b"TEXT named_metrics.num_requests_waiting=NaN, named_metrics.kv_cache_usage_perc=inf")
        == LoadReport()
    )


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"TEXT ,", b"XML <a/>", b"named_metrics.a=1", b"TEXTnamed_metrics.a=1"),
        *(b"TEXT a", b"TEXT =1", b"TEXT a=", b"TEXT a=b", b"TEXT a=1=2", b"TEXT a=1,", b"TEXT a=1,a=2", b"TEXT a=1_0"),
        *(b"TEXT a=\xff", "TEXT a=\u0661".encode(), b"TEXT a=0x1", b"TEXT a=1;b=2"),
        *(b"JSON", b"JSON {", b"JSON []", b"JSON 1", b"JSON null", b'JSON {"named_metrics": []}', b"JSON {} {}"),
        *(
            b'JSON {"named_metrics": {"a": "1"}}',
            b'JSON {"named_metrics": {"a": true}}',
            b'JSON {"named_metrics": NaN}',
        ),
        b"JSON " + b"[" * 2000,
        b"TEXT a=" + b"1" * MAX_REPORT_BYTES,
    ],
)
def test_malformed_report(value: bytes) -> None:
    assert read_report(value) is None


def test_ranks_that_report_by_the_same_name_are_malformed() -> None:
    """vLLM with data-parallel ranks: one of them must not be taken for all. (In JSON it says the last one only.)"""
    line = b"endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=9.0, named_metrics.num_requests_waiting=0.0"
    assert read_field(line) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"endpoint-load-metrics: TEXT named_metrics.num_requests_waiting=3\r\n", LoadReport(3.0)),
        (b'Endpoint-Load-Metrics:JSON {"named_metrics":{"num_requests_waiting":3}}\r\n', LoadReport(3.0)),
        (b"Endpoint-Load-Metrics-Bin: Qh8KFG51bV9yZXF1ZXN0c193YWl0aW5nEQAAAAAAAPA/\r\n", LoadReport(1.0)),
        (b"endpoint-load-metrics-bin: TEXT named_metrics.num_requests_waiting=3\r\n", None),
        (b"endpoint-load-metrics:\r\n", None),
        (b"endpoint-load-metrics-extra: TEXT\r\n", LoadReport()),
    ],
)
def test_a_field_line(line: bytes, expected: LoadReport | None) -> None:
    assert read_field(line) == expected


# --- Protobuf ---------------------------------------------------------------------------------------------------------


def field(number: int, kind: int, payload: bytes) -> bytes:
    return bytes([number << 3 | kind]) + payload


def string(number: int, text: bytes) -> bytes:
    assert len(text) < 128
    return field(number, 2, bytes([len(text)]) + text)


def double(number: int, value: float) -> bytes:
    return field(number, 1, struct.pack("<d", value))


def named(name: bytes, value: float) -> bytes:
    return string(8, string(1, name) + double(2, value))


def binary(message: bytes) -> LoadReport | None:
    return read_report(base64.b64encode(message), binary=True)


REPORT = (
    double(1, 0.9)  # cpu_utilization
    + field(3, 0, b"\xac\x02")  # rps, 300
    + named(b"kv_cache_usage_perc", 0.4)
    + field(15, 5, b"\0\0\0\0")  # a field of the future
    + named(b"num_requests_waiting", 7.0)
    + string(4, string(1, b"num_requests_waiting") + double(2, 99.0))  # request_cost: another map
)


def test_binary_report() -> None:
    assert binary(REPORT) == BUSY
    assert read_report(base64.b64encode(REPORT).rstrip(b"="), binary=True) == BUSY, "padding is optional in gRPC"
    assert read_report(b"BIN " + base64.b64encode(REPORT)) == BUSY
    assert binary(b"") == LoadReport()
    assert binary(string(8, string(1, b"num_requests_waiting"))) == LoadReport(waiting=0.0), "protobuf omits zeros"


def test_hand_checked_bytes() -> None:
    """Field 8, 31 bytes: field 1, 20 bytes, num_requests_waiting; field 2, the double 1."""
    message = bytes.fromhex("421f0a146e756d5f72657175657374735f77616974696e6711000000000000f03f")
    assert binary(message) == LoadReport(waiting=1.0)


@pytest.mark.parametrize(
    "message",
    [
        *(REPORT[:-1], b"\x42", b"\x42\x05abc", b"\x43", b"\x44", b"\x09\0", b"\x80" * 11),
        *(string(8, double(1, 1.0)), string(8, string(2, b"x")), named(b"\xff", 1.0)),
    ],
)
def test_malformed_binary_report(message: bytes) -> None:
    assert binary(message) is None


@pytest.mark.parametrize("value", [b"A", b"!!!!", b"QQ==QQ==", b" \n"])
def test_malformed_base64(value: bytes) -> None:
    assert read_report(value, binary=True) in (None, LoadReport())
    assert read_report(b"BIN " + b"*" + value) is None


# --- Anything ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=200), st.sampled_from([b"", b"TEXT ", b"JSON ", b"BIN "]), st.booleans())
def test_any_bytes_are_a_report_or_malformed(value: bytes, form: bytes, is_binary: bool) -> None:
    for report in (read_report(form + value, binary=is_binary), binary(value)):
        assert report is None or all(part is None or 0 <= part <= 1e9 for part in report)


@settings(max_examples=100, derandomize=True)
@given(st.dictionaries(st.text("ab_", min_size=1, max_size=5), st.floats(0, 1e9), max_size=5), st.floats(0, 1e9))
def test_all_forms_say_the_same(others: dict[str, float], waiting: float) -> None:
    metrics = {**others, "num_requests_waiting": waiting}
    text = "TEXT " + ", ".join(f"named_metrics.{name}={value!r}" for name, value in metrics.items())
    message = b"".join(named(name.encode(), value) for name, value in metrics.items())
    assert read_report(text.encode()) == binary(message) == LoadReport(waiting=waiting)
