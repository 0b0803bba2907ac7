# SPDX-License-Identifier: Apache-2.0
"""What engines say of their cache's size where they describe themselves: recorded, and as nobody should say it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.engines.handover import Handover
from lbproxy.core.engines.server_info import SERVER_INFO, Description, connector_of, engine_of, read_description
from lbproxy.core.requests.openai import read_model_list

RECORDED = Path(__file__).parents[2] / "fixtures" / "http"
PAGES = Path(__file__).parents[2] / "fixtures" / "metrics"
DEEP = b"[" * 100_000
NO_NUMBERS = ["null", "true", "false", '"4096"', "4096.0", "0", "-1", "1000000001", "1e30", "9" * 400, "[4096]", "{}"]
NO_PAGES = [
    *(b"", b"<html>", b"NaN", b"null", b"7", b"[]", b"{}", b'"x"', b"\xff\xfe", DEEP, b'{"a":' + DEEP),
    *(b'{"max_total_num_tokens":NaN}', b'{"total_slots":4,"default_generation_settings":[1]}'),
    *(b'{"max_total_num_tokens":4096', b'{"total_slots":4,"default_generation_settings":{"n_ctx":1024}'),
]


def body(name: str) -> bytes:
    return (RECORDED / f"{name}.response.http").read_bytes().partition(b"\r\n\r\n")[2]


def llama_cpp(slots: str, n_ctx: str) -> bytes:
    return f'{{"total_slots":{slots},"default_generation_settings":{{"n_ctx":{n_ctx}}}}}'.encode()


def sglang(tokens: str, more: str = "") -> bytes:
    return f'{{"max_total_num_tokens":{tokens}{more}}}'.encode()


def tokens_of(engine: str, page: bytes) -> int | None:
    said = read_description(engine, page)
    return None if said is None else said.tokens


def slots_of(engine: str, page: bytes) -> int | None:
    said = read_description(engine, page)
    return None if said is None else said.slots


def test_recorded_pages_are_read() -> None:
    """SGLang's was started with 4,096 tokens (its metrics: 256 pages of 16), llama.cpp with two slots of 1,024."""
    assert read_description("sglang", body("sglang-0.5.23/get_server_info")) == Description(
        4096, False, 2048, Handover()
    )
    assert read_description("llamacpp", body("llama.cpp-b11434/props")) == Description(2048, True, 2, None, 1024)


@pytest.mark.parametrize(
    ("states", "slots"),
    [
        ('[{"effective_max_running_requests_per_dp":52},{}]', 104),
        ("[{}]", None),
        ("[]", None),
        ("{}", None),
        ("[null]", None),
        ('[{"effective_max_running_requests_per_dp":-1}]', None),
        ('[{"effective_max_running_requests_per_dp":"52"}]', None),
    ],
)
def test_each_data_parallel_rank_runs_as_many_requests(states: str, slots: int | None) -> None:
    assert slots_of("sglang", sglang("100", f',"dp_size":2,"internal_states":{states}')) == slots


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_what_is_no_number_of_slots_is_unknown(number: str) -> None:
    assert slots_of("llamacpp", llama_cpp(number, "1024")) is None


@pytest.mark.parametrize(
    ("ranks", "tokens"),
    [("8", 800_000), ("1", 100_000), ("0", 100_000), ("-2", 100_000), ("null", 100_000), ('"8"', 100_000)],
)
def test_each_data_parallel_rank_has_a_cache(ranks: str, tokens: int) -> None:
    assert tokens_of("sglang", sglang("100000", f',"dp_size":{ranks}')) == tokens


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_what_is_no_number_of_tokens_is_unknown(number: str) -> None:
    """Never 0, which would make the cache look full for ever, and nothing that hides all others."""
    assert tokens_of("sglang", sglang(number)) is None
    assert tokens_of("llamacpp", llama_cpp(number, "1024")) is None
    assert tokens_of("llamacpp", llama_cpp("4", number)) is None


def test_a_product_is_bounded_too() -> None:
    assert tokens_of("llamacpp", llama_cpp("32000", "31250")) == 1_000_000_000
    assert tokens_of("llamacpp", llama_cpp("32000", "31251")) is None
    assert tokens_of("sglang", sglang("600000000", ',"dp_size":2')) is None


@pytest.mark.parametrize("page", NO_PAGES)
@pytest.mark.parametrize("engine", SERVER_INFO)
def test_what_is_no_such_page_says_no_size(engine: str, page: bytes) -> None:
    assert tokens_of(engine, page) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(_JSON, _JSON, _JSON)
def test_any_json_gives_a_size_or_nothing(one: object, two: object, three: object) -> None:
    fields = {"max_total_num_tokens": one, "dp_size": two, "total_slots": one, "default_generation_settings": three}
    fields["internal_states"] = [{"effective_max_running_requests_per_dp": three}, one]
    nested = {**fields, "default_generation_settings": {"n_ctx": three}}
    for engine in SERVER_INFO:
        for page in (fields, nested):
            said = read_description(engine, json.dumps(page).encode())
            for number in () if said is None else (said.tokens, said.slots):
                assert number is None or 0 < number <= 1_000_000_000


@pytest.mark.parametrize(
    ("server", "engine"), [("sglang-0.5.23", "sglang"), ("llama.cpp-b11434", "llamacpp"), ("vllm-0.32.0", "vllm")]
)
def test_a_server_names_its_engine_with_its_models(server: str, engine: str) -> None:
    name = "models-two-names" if engine == "vllm" else "models"
    cards = read_model_list(body(f"{server}/{name}"))
    assert cards
    assert engine_of(cards) == engine
    assert (engine in SERVER_INFO) is (engine != "vllm")


@pytest.mark.parametrize(
    "entries", ["", '{"id":"m"}', '{"id":"m","owned_by":null}', '{"id":"m","owned_by":["sglang"]}']
)
def test_a_server_that_names_no_engine_may_be_any(entries: str) -> None:
    cards = read_model_list(f'{{"data":[{entries}]}}'.encode())
    assert cards is not None
    assert engine_of(cards) is None


@pytest.mark.parametrize("mode", ['"dynamic"', "7", "true", "[]", '{"a":1}', '["prefill"]', '"PREFILL"'])
def test_a_mode_that_is_no_known_word_is_no_role(mode: str) -> None:
    assert read_description("sglang", sglang("4096", f',"disaggregation_mode":{mode}')) == Description(
        4096, False, None
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["idle", "after"])
def test_a_recorded_page_shows_nixl_from_the_start(role: str, when: str) -> None:
    assert connector_of((PAGES / f"vllm-0.32.0-nixl-{role}-{when}.prom").read_bytes()) == "nixl"


@pytest.mark.parametrize("name", ["example-connector-idle", "idle-after-requests", "busy-2-running-rejecting"])
def test_other_recorded_pages_show_no_connector(name: str) -> None:
    assert connector_of((PAGES / f"vllm-0.32.0-{name}.prom").read_bytes()) is None
