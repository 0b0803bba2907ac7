# SPDX-License-Identifier: Apache-2.0
"""Request bodies from strangers, model lists from servers, and errors as OpenAI's SDKs read them."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lbproxy.core.requests.models import resolve
from lbproxy.core.requests.openai import (
    error_body,
    event_of_response,
    model_list,
    place_for_name,
    read_json_body,
    read_model_list,
)
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import MAX_DEPTH


def outcome_of(body: bytes) -> Outcome:
    with pytest.raises(LbError) as caught:
        read_json_body(body)
    return caught.value.outcome


def with_a_model(body: bytes, model: str) -> bytes:
    return b"".join(place_for_name(body).named(body, model))


def test_model_and_stream_are_read() -> None:
    facts = read_json_body(b'{"model":"a/b","stream":true,"max_tokens":7,"cache_salt":"s"}')
    assert (facts.model, facts.stream, facts.max_tokens, facts.cache_salt) == ("a/b", True, 7, "s")
    assert facts.fields == {"model": "a/b", "stream": True, "max_tokens": 7, "cache_salt": "s"}
    facts = read_json_body(b'{"stream":"yes","max_tokens":1.5,"cache_salt":1}')
    assert facts[:4] == (None, False, None, None)


@pytest.mark.parametrize(
    ("text", "limit"),
    [('"max_completion_tokens":3,"max_tokens":4', 4), ('"max_tokens":1,"max_output_tokens":9,"n_predict":2', 9)]
    + [('"max_tokens":1,"n_predict":-1', None), ('"max_tokens":1,"sampling_params":{"max_new_tokens":9}', None)]
    + [('"max_tokens":true', None), ('"max_tokens":0', None), ("", None)]
    + [(f'"max_tokens":{n}', None) for n in (-1, 1 << 31, "null", "[]")],
)
def test_the_limit_of_an_answer_is_a_sane_number_or_unknown(text: str, limit: int | None) -> None:
    assert read_json_body(b"{%s}" % text.encode()).max_tokens == limit


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"first","model":"last"}',
        b'{"m\\u006fdel":"escaped"}',
        b'{"nested":{"model":"no"},"model":"yes"}',
        b' \n{"model":"space"} \n',
        b'{"model":"nan","temperature":NaN}',
        b'{"model":"inf","x":[Infinity,-Infinity]}',
        b'{"model":"lone","x":"\\ud800"}',
    ],
)
def test_the_model_is_the_one_that_a_servers_json_parser_sees(body: bytes) -> None:
    assert read_json_body(body).model == json.loads(body)["model"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"x"',
        b"[1]",
        b'"x"',
        b"null",
        b'{"model":"x"} x',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b"{'a':1}",
    ],
)
def test_what_is_no_json_object_is_said_so(body: bytes) -> None:
    assert outcome_of(body) is Outcome.INVALID_JSON


def nested(levels: int, opening: bytes = b'{"a":', closing: bytes = b"}") -> bytes:
    """A value of so many levels."""
    return opening * levels + b"1" + closing * levels


@pytest.mark.parametrize(("opening", "closing"), [(b'{"a":', b"}"), (b"[", b"]"), (b'[[1],{"a":', b"}]")])
def test_a_body_nested_deeper_than_servers_can_read_is_refused(opening: bytes, closing: bytes) -> None:
    """A server that answers 500 to it would be blamed for it, and the next one asked."""
    per_level = len(closing)
    body = b'{"model":"m","messages":[],"tools":%s,"x":%s}'
    fits = nested((MAX_DEPTH - 1) // per_level, opening, closing)
    assert read_json_body(body % (fits, b"1")).model == "m"
    deeper = nested(MAX_DEPTH // per_level + 1, opening, closing)
    for more in (b"1", b"NaN", b'"' + b"x" * (300 << 10) + b'"'):  # other ways to read it
        with pytest.raises(LbError) as refused:
            read_json_body(body % (deeper, more))
        assert refused.value.outcome is Outcome.INVALID_JSON


def test_brackets_in_text_and_side_by_side_do_not_count_as_depth() -> None:
    assert read_json_body(b'{"model":"m","prompt":"%s","x":[%s{}]}' % (b"[{" * 5000, b'{"a":[]},' * 5000)).model == "m"


def test_a_model_card_that_cannot_be_written_is_left_out() -> None:
    page = b'{"data":[{"id":"deep","x":%s},{"id":"m"}]}' % nested(300)
    assert [card.id for card in read_model_list(page) or ()] == ["m"]


def test_a_body_whose_parsing_would_hold_the_loop_is_refused_unparsed() -> None:
    assert outcome_of(b'{"a":[' + b"{}," * 1_000_000 + b"{}]}") is Outcome.INVALID_JSON


def test_a_refused_body_is_not_read_again_if_that_would_hold_the_loop() -> None:
    """json.loads takes three times as long as orjson."""
    assert read_json_body(b'{"model":"m","x":[' + b"[]," * 10_000 + b"NaN]}").model == "m"
    assert outcome_of(b'{"model":"m","x":[' + b"[]," * 60_000 + b"NaN]}") is Outcome.INVALID_JSON


def test_what_is_utf_16_is_no_json() -> None:
    """Python's json reads it; nothing could be put into it, and other servers read something else."""
    assert outcome_of('{"model":"m"}'.encode("utf-16")) is Outcome.INVALID_JSON
    assert outcome_of('{"model":"m"}'.encode("utf-16-le")) is Outcome.INVALID_JSON
    assert json.loads(with_a_model(b'\xef\xbb\xbf {"a":1}', "m")) == {"model": "m", "a": 1}


@pytest.mark.parametrize("model", ["null", "1", '""', "[]", '"a\\nb"', '"a\\u0000"', '"' + "x" * 257 + '"', "true"])
def test_a_model_that_is_no_name_is_refused(model: str) -> None:
    assert outcome_of(b'{"model":%s}' % model.encode()) is Outcome.MISSING_MODEL


@given(st.binary(max_size=200))
def test_any_bytes_give_facts_or_an_error(body: bytes) -> None:
    with contextlib.suppress(LbError):
        assert read_json_body(body).stream in {True, False}


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
    st.sampled_from(["m", 'q"\\']),
)
def test_a_model_is_put_in_without_touching_the_rest(fields: dict[str, object], model: str) -> None:
    fields.pop("model", None)
    for body in (json.dumps(fields).encode(), b"\n " + json.dumps(fields, indent=1).encode()):
        spliced = with_a_model(body, model)
        assert json.loads(spliced) == {"model": model, **fields}
        assert spliced.endswith(body.lstrip()[1:].lstrip())


def test_no_model_means_the_only_one() -> None:
    assert resolve("named", []) == "named"
    assert resolve(None, ["one"]) == "one"
    for served in ([], ["one", "two"]):
        with pytest.raises(LbError):
            resolve(None, served)


def test_model_lists_keep_unknown_fields_and_drop_what_is_no_card() -> None:
    page = {
        "data": [
            {"id": "a", "max_model_len": 5, "new": {"x": 1}},
            {"id": "lora", "parent": "a"},
            {"id": 7},
            {"id": "bad\nname"},
            "no",
        ]
    }
    cards = read_model_list(json.dumps(page).encode())
    assert cards is not None
    assert [(card.id, card.parent) for card in cards] == [("a", None), ("lora", "a")]
    assert json.loads(model_list(cards)) == {"object": "list", "data": page["data"][:2]}


@pytest.mark.parametrize("page", [b"", b"<html>", b"[]", b'{"data":{}}', b"{}", b'{"data":null}'])
def test_what_is_no_model_list_is_none(page: bytes) -> None:
    assert read_model_list(page) is None


def test_errors_have_openais_shape() -> None:
    assert json.loads(error_body(LbError(Outcome.MODEL_NOT_FOUND, "no", param="model"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    }


@pytest.mark.parametrize(
    ("status", "body", "message", "more"),
    [
        (400, b'{"error":{"message":"m","type":"t","param":"p","code":"c"}}', "m", ("t", "p", "c")),
        (400, b'{"object":"error","message":"m","type":"BadRequest","code":400}', "m", ("BadRequest", None, 400)),
        (422, b'{"detail":"m"}', "m", ("invalid_request_error", None, 422)),
        (500, b'{"error":"m"}', "m", ("server_error", None, 500)),
        (200, b'{"error":{"message":"m\\n\\ndata: x","code":503}}', "m\n\ndata: x", ("server_error", None, 503)),
        (200, b'{"message":"m"}', None, ("server_error", None, 200)),
        (404, b'{"error":{"message":{"a":1}}}', None, ("invalid_request_error", None, 404)),
        (422, b'{"detail":[{"loc":1}]}', None, ("invalid_request_error", None, 422)),
        (502, b"<html>" + b"[" * 5000, None, ("server_error", None, 502)),
        (400, b"[]", None, ("invalid_request_error", None, 400)),
    ],
)
def test_what_a_server_says_in_place_of_a_stream_is_one_event(
    status: int, body: bytes, message: str | None, more: tuple[object, ...]
) -> None:
    """In either API's form, with the server's words where it has some."""
    event = event_of_response(status, body, "/v1/completions")
    assert (event.startswith(b"data: "), event.count(b"\n"), event.endswith(b"\n\n")) == (True, 2, True)
    said = json.loads(event[6:])["error"]
    assert said["message"] == (message or f"The model server returned status {status}, and no event stream.")
    assert (said["type"], said["param"], said["code"]) == more
    event = event_of_response(status, body, "/v1/messages")
    assert event.startswith(b"event: error\ndata: ")
    other = json.loads(event.partition(b"data: ")[2])
    assert (other["type"], other["error"]["message"]) == ("error", said["message"])
    kinds = {400: "invalid_request_error", 404: "not_found_error"}
    assert other["error"]["type"] == (
        kinds.get(status, "invalid_request_error") if 400 <= status < 500 else "api_error"
    )


def test_every_outcome_that_lbproxy_answers_has_all_that_an_answer_needs() -> None:
    codes = [outcome.value.code for outcome in Outcome]
    assert len(set(codes)) == len(codes)
    for outcome in Outcome:
        facts = outcome.value
        assert (facts.status == 0) == (outcome in {Outcome.COMPLETED, Outcome.UPSTREAM_BROKE, Outcome.CUT})
        if facts.status:
            assert facts.message
            assert facts.error_type


def test_a_model_list_that_would_take_long_to_read_is_none() -> None:
    """4 MB of empty lists took half a second, in which nobody was served; a list of 3,000 of vLLM's cards is read."""
    assert read_model_list(b'{"data":[{"id":"m"}],"x":[' + b",".join([b"[]"] * 1_000_000) + b"]}") is None
    permission = {f"allow_{n}": True for n in range(12)}
    card = {
        "object": "model",
        "created": 1,
        "owned_by": "vllm",
        "root": "m",
        "parent": None,
        "permission": [permission],
    }
    cards = [{"id": f"m{n}", **card} for n in range(3000)]
    assert len(read_model_list(json.dumps({"object": "list", "data": cards}).encode()) or []) == 3000
