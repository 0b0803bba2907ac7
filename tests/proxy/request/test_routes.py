# SPDX-License-Identifier: Apache-2.0
"""What a server reads of a path and a body is what lbproxy decides by, or it is refused."""

from __future__ import annotations

import json
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.stored_responses import StoredResponses
from lbproxy.core.requests.models import ModelRules
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.headers import read_request_fields
from lbproxy.proxy.request.legs import NIXL_FIRST, OWN_FIELDS, Bodies
from lbproxy.proxy.request.reading import RequestReader
from lbproxy.proxy.request.routes import _LORA_PATHS, _ROUTES, Body, Form, find_route, form_of, served_path
from tests.support.compiled import interpreted
from tests.support.rig import settings_for

CHAT = "/v1/chat/completions"
JSON_ROUTES = sorted(path for path, route in _ROUTES.items() if route.body is Body.JSON)
PARAMS = {"do_remote_prefill": True}


pytestmark = interpreted


class TwoModels:
    """A runtime before servers of two models, where prefill and decode are apart."""

    splits = True
    block_bytes = 64

    def __init__(self, *models: str) -> None:
        self._models = models or ("m", "n")
        self.serving = self
        self.stored_responses = StoredResponses()

    def base_models(self) -> tuple[str, ...]:
        return self._models

    def model_cards(self) -> list[object]:
        return []

    def has_listed(self, model: str) -> bool:
        return model in self._models

    def members(self) -> list[TwoModels]:
        """One that has every API."""
        return [self]

    def has_api(self, _: str) -> bool:
        return True

    def stored(self, _: str) -> None:
        return None

    def now(self) -> float:
        return 0.0


def request(
    body: bytes, path: str, content_type: bytes | None = b"application/json", method: str = "POST"
) -> ClientRequest:
    raw = [(b"Host", b"lb"), *([] if content_type is None else [(b"Content-Type", content_type)])]
    return ClientRequest(method, path, find_route(method, path.partition("?")[0]), read_request_fields(raw), body)


def placed(asked: ClientRequest, *models: str) -> InferenceRequest:
    reading = RequestReader(
        settings_for(["http://10.0.0.1:8000"]), cast(RequestRuntime, TwoModels(*models)), ModelRules({})
    )
    record = RequestRecord("r", asked.method, asked.target, "127.0.0.1", 0.0)
    return reading.interpret(asked, record)[1]


def refusal(asked: ClientRequest) -> Outcome | None:
    try:
        placed(asked)
    except LbError as error:
        return error.outcome
    return None


# Paths


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/%63hat/completions", "/v1/chat%2Fcompletions", "/v1/chat%2fcompletions", "/v1/chat%252Fcompletions"),
        *("/v1//chat/completions", "//v1/chat/completions", "/v1/chat/completions;a=1", "/v1/chat;a/completions"),
        *("/v1/chat\\completions", "/v1/chat%5Ccompletions", "/v1/CHAT/completions", "/v1/chat/completions//"),
        *("/v1/chat/completions%20", "/v1/chat/completions%3Fa", "/v1/chat/completions%23a", "/v1%2Fchat/completions"),
        *("/v1/chat/./completions", "/v1/x/../chat/completions", "/v1/chat/%2e/completions", "/v1/x/%2E%2e/chat"),
        *("/v1/chat/completions%00", "/v1/chat%c0%afcompletions", "/v1/chat%e0%80%afcompletions", "/v1/files/%e9"),
        *("/generat%65", "/%67enerate", "//generate", "/v1/respons%65s/resp_1", "/v1//responses/resp_1"),
        *("/v1/load%5flora_adapter", "/v1/load_lora_adapter/", "/v1/%75nload_lora_adapter", "/v1/model%73/m"),
    ],
)
def test_a_path_that_servers_read_in_different_ways_is_refused(path: str) -> None:
    with pytest.raises(LbError) as raised:
        find_route("POST", path, lora_management=True)
    assert raised.value.outcome in {Outcome.BAD_REQUEST, Outcome.UNKNOWN_URL, Outcome.FORBIDDEN}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((f"{CHAT}/", "chat_completions"), ("/v1/responses/", "responses"), ("/generate/", "generate")),
        *(("/v1/files/a%20b", "other"), ("/v1/files/Abc%2Fd", "other"), ("/v1/files/%C3%A9", "other")),
        *((f"{CHAT}/chatcmpl-Ab1", "other"), ("/v1/responses/resp_1/cancel", "other"), ("/v1/new/Thing", "other")),
    ],
)
def test_ordinary_paths_and_a_last_slash_are_what_they_were(path: str, name: str) -> None:
    """A server takes the slash for nothing, or redirects to the path without it: both read the same route."""
    assert find_route("POST", path).name == name


def _spelled(path: str, changes: list[tuple[int, str]]) -> str:
    """A path with some of its characters written otherwise."""
    for where, how in changes:
        at = 1 + where % (len(path) - 1)
        one = path[at]
        other = {"escape": f"%{ord(one):02x}", "double": f"%25{ord(one):02X}", "case": one.upper(), "twice": one + "/"}
        path = path[:at] + other.get(how, one + how) + path[at + 1 :]
    return path


@settings(max_examples=500)
@given(
    path=st.sampled_from(sorted({*_ROUTES, *_LORA_PATHS} - {"/"})),
    changes=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(["escape", "double", "case", "twice", ";a", "%3b", "/.", "\\"])),
        max_size=4,
    ),
)
def test_no_spelling_of_a_known_path_is_taken_for_another_one(path: str, changes: list[tuple[int, str]]) -> None:
    spelled = _spelled(path, changes)
    served = served_path(spelled)
    try:
        route = find_route("POST", spelled, lora_management=True)
    except LbError:
        return
    assert served is not None
    assert served_path(served) == served
    if served in _ROUTES:
        assert route is _ROUTES[served]
        assert spelled.removesuffix("/") == served
    else:
        assert served not in _LORA_PATHS or spelled == served


# The form of bodies


@pytest.mark.parametrize("path", JSON_ROUTES)
@pytest.mark.parametrize("content_type", [None, b"text/plain", b"application/octet-stream", b"multipart/form-data"])
def test_json_is_placed_by_its_model_whatever_its_type_says(path: str, content_type: bytes | None) -> None:
    assert placed(request(b'{"model":"n","input":"x"}', path, content_type)).model == "n"


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_without_a_model_it_goes_to_no_server_by_chance(path: str) -> None:
    assert refusal(request(b'{"input":"x"}', path, None)) is Outcome.MISSING_MODEL
    assert refusal(request(b"", path, None)) is Outcome.INVALID_JSON


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "GET"])
@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/new", "/v1/realtime", "/v1/images/edits", "/infill"]
)
@pytest.mark.parametrize(
    "content_type",
    [None, b"", b"text/plain", b"Text/JSON", b"application/x-www-form-urlencoded", b"json", b"application/vnd.a+json"],
)
def test_a_field_that_only_lbproxy_may_set_is_refused_whatever_carries_it(
    method: str, path: str, content_type: bytes | None
) -> None:
    for name in OWN_FIELDS:
        for body in (json.dumps({"model": "m", name: PARAMS}).encode(), b' \r\n\t{"%b":1}' % name.encode()):
            assert refusal(request(body, path, content_type, method)) in {Outcome.RESERVED_FIELD, Outcome.MISSING_MODEL}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","\\u006bv_transfer_params":{"a":1}}',
        b'{"model":"m","kv_transfer_params":{"a":1},"kv_transfer_params":null}',
        b'{"model":"m","kv_transfer_params":{"a":1},"\\u006Bv_transfer\\u005fparams":null}',
        b'\xef\xbb\xbf{"model":"m","kv_transfer_params":{"a":1}}',
        b'{"model":"m","kv_transfer_params":NaN}',
        b'{"model":"m","vllm_xargs":{"kv_transfer_params":"x"}}',
        b'{"model":"m","vllm_xargs":{"a":1,"\\u006bv_transfer_params":null}}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/new"])
def test_no_spelling_of_such_a_field_passes(path: str, body: bytes) -> None:
    assert refusal(request(body, path)) is Outcome.RESERVED_FIELD
    assert refusal(request(body, path, None)) is Outcome.RESERVED_FIELD


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("content_type", [None, b"application/json", b"text/plain"])
@pytest.mark.parametrize("path", [CHAT, "/v1/new", "/v1/images/edits"])
def test_json_in_an_encoding_that_only_some_servers_guess_is_refused(
    encoding: str, content_type: bytes | None, path: str
) -> None:
    body = json.dumps({"model": "m", "kv_transfer_params": PARAMS}).encode(encoding)
    assert refusal(request(body, path, content_type)) is Outcome.INVALID_JSON


@pytest.mark.parametrize("charset", ["utf-16", "UTF-7", '"utf-32"', "ibm037", "shift_jis"])
def test_another_charset_is_refused(charset: str) -> None:
    for path in ("/v1/new", "/v1/images/edits"):
        kind = f"application/json; charset={charset}".encode()
        assert refusal(request(b'{"model":"m"}', path, kind)) is Outcome.BAD_REQUEST


@pytest.mark.parametrize(
    "charset", ["utf-8", "UTF8", '"utf-8"', "us-ascii", "ISO-8859-1", "windows-1252", "utf-8; a=b"]
)
def test_charsets_that_clients_name_by_habit_are_none_of_our_business(charset: str) -> None:
    assert placed(request(b'{"model":"m"}', "/v1/new", f"application/json; charset={charset}".encode())).model == "m"


@pytest.mark.parametrize(
    ("content_type", "form"),
    [
        *((b"application/json", Form.JSON), (b"application/problem+json; a=b", Form.JSON), (b"text/json", Form.JSON)),
        *((b"", Form.MAYBE_JSON), (b"text/plain", Form.MAYBE_JSON), (b"garbage", Form.MAYBE_JSON)),
        *((b"multipart/form-data; boundary=json", Form.MULTIPART), (b"application/x-ndjson", Form.OPAQUE)),
        *((b"audio/wav", Form.OPAQUE), (b"application/sdp", Form.OPAQUE), (b"application/octet-stream", Form.OPAQUE)),
        (b"multipart/form-data, application/json", Form.MAYBE_JSON),
    ],
)
def test_a_content_type_is_read_by_its_media_type_alone(content_type: bytes, form: Form) -> None:
    """A form whose boundary had the word json in it was read as JSON, and refused."""
    assert form_of(Body.BY_TYPE, content_type) is form
    assert form_of(Body.JSON, content_type) is Form.JSON
    assert form_of(Body.ANY, content_type) is Form.OPAQUE


def test_what_is_neither_json_nor_a_form_names_its_model_in_the_query_or_the_only_one_is_meant() -> None:
    """A WebRTC offer went to a server of any model."""
    offer = request(b"v=0", "/v1/realtime?model=n", b"application/sdp")
    assert placed(offer).model == "n"
    assert placed(request(b"v=0", "/v1/realtime", b"application/sdp"), "m").model == "m"
    assert refusal(request(b"v=0", "/v1/realtime", b"application/sdp")) is Outcome.MISSING_MODEL
    assert placed(request(b"abc", "/v1/new", b"text/plain")).model is None


# The fields that are read

FIELDS = [
    *("model", "stream", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
    *("min_tokens", "cache_salt", "store", "previous_response_id", "prompt_cache_key", "use_beam_search", "echo"),
    *("prompt_embeds", "background", "prompt_logprobs", "prompt", "messages", "tools", "system", "input", "user"),
    *("instructions", "text", "input_ids", "input_extra", "input_prefix", "input_suffix", "stream_options"),
    *OWN_FIELDS,
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 64), 1 << 65),
    st.floats(),
    st.text(st.characters(codec=None), max_size=4),
    st.sampled_from([0, 1, 2, 1.0, "", "1", "text", "user", "\ud800", 1 << 200]),
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "tool_call_id", "image_url", "url", "source", "detail"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)


@settings(max_examples=1500)
@given(
    path=st.sampled_from([*JSON_ROUTES, "/v1/images/edits", "/v1/new"]),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5),
    named=st.booleans(),
    deep=st.sampled_from([0, 0, 0, 100, 300, 800]),
)
def test_no_value_of_any_type_in_a_field_that_is_read_is_a_defect(
    path: str, fields: dict[str, object], named: bool, deep: int
) -> None:
    """`"n": [1]` was a 500 and a traceback, and so was what orjson reads and cannot write."""
    whole: dict[str, object] = {**fields, "extra": json.loads("[" * deep + "]" * deep or "1")}
    whole |= {"model": "m"} if named else {}
    asked = request(json.dumps(whole).encode(), path)
    refused = refusal(asked)
    assert refused is None or refused.value.status == 400
    if refused is None and placed(asked).splittable:
        try:
            bodies = Bodies(asked.route.name, asked.body)
        except ValueError:
            return
        for leg in (bodies.first(NIXL_FIRST), bodies.first(None, min_tokens=1), bodies.second(PARAMS)):
            json.loads(leg)
        json.loads(bodies.with_fields({"bootstrap_room": 1}))


@pytest.mark.parametrize("name", ["n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize("value", [[1], [], {}, "1", 0, True, -1, 1.5, [[]], {"a": 1}])
def test_what_is_not_understood_is_not_split(name: str, value: object) -> None:
    assert placed(request(json.dumps({"model": "m", "prompt": "x", "max_tokens": 9}).encode(), CHAT)).splittable
    asked = json.dumps({"model": "m", "prompt": "x", name: value}).encode()
    assert placed(request(asked, CHAT)).splittable is (name in {"n", "best_of"} and value is True)


def test_an_escape_spells_the_same_path_nowhere() -> None:
    """Every single character of a known path, escaped."""
    for path in _ROUTES:
        for at, one in enumerate(path[1:], 1):
            escaped = f"{path[:at]}%{ord(one):02X}{path[at + 1 :]}"
            assert served_path(escaped) == path
            with pytest.raises(LbError):
                find_route("POST", escaped)
