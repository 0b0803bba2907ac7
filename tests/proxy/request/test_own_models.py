# SPDX-License-Identifier: Apache-2.0
"""Clients that have models of their own (`flows.*.models`), through real sockets on both ways in: for them nothing else
exists.
"""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from lbproxy.core.endpoints.endpoint import EndpointUid
from lbproxy.core.requests.outcome import Outcome
from lbproxy.proxy.request.keys import KeyRing
from tests.support.aio import run
from tests.support.endpoint import ScriptedEndpoint, answer
from tests.support.pool import card
from tests.support.rig import Reply, Rig, post, rig, settings_for
from tests.support.sockets import upgrade

KEYS = {"ann": "sk-ann-0123456789abcdef", "boss": "sk-boss-fedcba9876543210"}
FLOWS = """
models: {coder: {to: llama}, hidden: {to: qwen-7b}, "gpt-*": {to: llama}}
flows:
  header: true
  default: {models: ["qwen*", coder, "*-mini"]}
  named:
    boss: {models: null}
    wide: {models: ["*"]}
    none: {models: []}
"""
"""qwen-7b and its adapter are served at e1, llama and its adapter at e2."""


async def keyed(it: Rig, request: bytes, name: str = "ann", more: str = "") -> Reply:
    head, _, rest = request.partition(b"\r\n")
    return await it.ask(head + f"\r\nAuthorization: Bearer {KEYS[name]}\r\n{more}".encode() + rest)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: lb\r\n\r\n".encode()


def guard(it: Rig) -> Rig:
    it.front.requests.keys = KeyRing({sha256(key.encode()).digest(): name for name, key in KEYS.items()})
    served = {"e1": ["qwen-7b", "sql"], "e2": ["llama", "poet", "gpt-mini"]}
    for endpoint in it.endpoints:
        first, *adapters = served[endpoint.name]
        it.runtime.report_models(endpoint.uid, [card(first), *(card(one, parent=first) for one in adapters)])
    return it


def chat(model: str, **more: object) -> bytes:
    return post(json.dumps({"model": model, **more}).encode())


def form(*models: str, end: str = "--", path: str = "/v1/audio/transcriptions") -> bytes:
    parts = "".join(f'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\n{one}\r\n' for one in models)
    body = parts + f'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--B{end}\r\n'
    head = f"POST {path} HTTP/1.1\r\nHost: lb\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def audio(path: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: lb\r\nContent-Type: audio/wav\r\nContent-Length: 1\r\n\r\nx".encode()


def typed(kind: str, body: str, path: str = "/v1/tomorrow") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: lb\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def code(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"]["code"])


def missing(reply: Reply, name: str) -> bool:
    """Whether it is the same as for a model that nobody serves."""
    said = json.loads(reply.body)
    said = said["error"]
    return (reply.status, said["message"]) == (
        404,
        f"The model `{name}` does not exist; GET /v1/models lists those that do.",
    )


def test_a_client_sees_only_its_models() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as one, ScriptedEndpoint() as two, rig(one.url, two.url, more=FLOWS) as it:
            guard(it)

            async def listed(name: str, more: str = "") -> list[str]:
                reply = await keyed(it, get("/v1/models"), name, more)
                return [entry["id"] for entry in json.loads(reply.body)["data"]]

            everything = ["qwen-7b", "sql", "llama", "poet", "gpt-mini", "coder", "hidden"]
            for _ in range(2):  # lists are kept
                assert await listed("ann") == ["qwen-7b", "gpt-mini", "coder"]
                assert await listed("boss") == everything
            assert await listed("ann", "x-lbproxy-flow: wide\r\n") == ["qwen-7b", "gpt-mini", "coder"]
            assert await listed("boss", "x-lbproxy-flow: wide\r\n") == everything
            assert await listed("boss", "x-lbproxy-flow: other\r\n") == ["qwen-7b", "gpt-mini", "coder"]
            assert await listed("ann", "x-lbproxy-flow: none\r\n") == []
            for path in ("/v1/models/qwen-7b", "/v1/models/qwen%2D7b", "/v1/models/coder"):
                assert (await keyed(it, get(path))).status == 200
            told = []
            for name in ("llama", "poet", "hidden", "no-such", "%6clama"):
                reply = await keyed(it, get(f"/v1/models/{name}"))
                assert missing(reply, name.replace("%6c", "l")), reply.body
                told.append(reply.body.replace(name.replace("%6c", "l").encode(), b"NAME"))
            assert len(set(told)) == 1

    run(main())


ALLOWED = {
    "its own": (chat("qwen-7b"), "e1"),
    "an escape": (post(b'{"model":"qwen\\u002d7b"}'), "e1"),
    "an alias": (chat("coder"), "e2"),
    "a pattern with its end": (chat("gpt-mini"), "e2"),
    "a form": (form("qwen-7b"), "e1"),
    "a query": (audio("/v1/audio/transcriptions?model=qwen%2D7b"), "e1"),
    "none, of which one is its own": (post(b'{"prompt":"x"}', "/v1/completions"), "e1"),
    "a route of tomorrow": (post(b'{"x":1}', "/v1/tomorrow"), "e1"),
    "a read of tomorrow": (get("/v1/tomorrow"), "e1"),
    "an object that nobody knows": (get("/v1/responses/resp_1234"), "e1"),
    "a header that means nothing": (post(b'{"model":"qwen-7b"}', more="x-lbproxy-model: llama\r\n"), "e1"),
    "an adapter of its own": (chat("qwen-7b", lora_path=["qwen-7b", None]), "e1"),
    "its own within": (post(b'{"session":{"model":"qwen-7b"},"schema":{"model":{}}}', "/v1/tomorrow"), "e1"),
    "a tool of the client's": (
        chat("qwen-7b", tools=[{"type": "function", "function": {"parameters": {"model": "llama"}}}], x={"model": "y"}),
        "e1",
    ),
    "a form of tomorrow": (form(path="/v1/files"), "e1"),
}


@pytest.mark.parametrize("flow", ["", "x-lbproxy-flow: wide\r\n", "x-lbproxy-flow: boss\r\n"])
@pytest.mark.parametrize("what", ALLOWED)
def test_what_is_its_own_goes_where_that_is(what: str, flow: str) -> None:
    request, where = ALLOWED[what]

    async def main() -> None:
        async with (
            ScriptedEndpoint(answer(b"{}")) as one,
            ScriptedEndpoint(answer(b"{}")) as two,
            rig(one.url, two.url, more=FLOWS) as it,
        ):
            guard(it)
            for _ in range(4):  # however it is chosen
                reply = await keyed(it, request, more=flow)
                assert reply.status == 200, reply.body
            assert (len(one.requests), len(two.requests)) == ((4, 0) if where == "e1" else (0, 4))
            sent = (one.requests + two.requests)[0]
            assert sent.field("x-lbproxy-model") is None

    run(main())


LARGE = {"model": "llama", "messages": [{"role": "user", "content": "a\n" * (1 << 19)}]}
NOT_ITS_OWN = {
    "another's": (chat("llama"), "llama"),
    "an adapter": (chat("sql"), "sql"),
    "nobody's": (chat("no-such"), "no-such"),
    "another case": (chat("QWEN-7b"), "QWEN-7b"),
    "other characters": (post('{"model":"\uff51wen-7b"}'.encode()), "\uff51wen-7b"),
    "an escape": (post(b'{"model":"\\u006clama"}'), "llama"),
    "an alias of its own": (chat("hidden"), "hidden"),
    "what a pattern of models takes": (chat("gpt-4o"), "gpt-4o"),
    "a pattern itself": (chat("*-mini?"), "*-mini?"),
    "aiohttp's": (post(b'{"model":"llama"}', "/v1/embeddings"), "llama"),
    "anthropic's": (post(b'{"model":"llama"}', "/v1/messages"), "llama"),
    "responses": (post(b'{"model":"llama"}', "/v1/responses"), "llama"),
    "native": (post(b'{"model":"llama"}', "/generate"), "llama"),
    "sglang's adapter": (chat("qwen-7b", lora_path="poet"), "poet"),
    "several adapters": (chat("qwen-7b", lora_path=["qwen-7b", "poet"]), "poet"),
    "a blank at its end": (chat("qwen-7b "), "qwen-7b "),
    "a byte order mark": (post(b'\xef\xbb\xbf{"model":"llama"}'), "llama"),
    "a body of PATCH": (
        typed("text/json", '{"model":"llama"}', "/v1/responses").replace(b"POST", b"PATCH", 1),
        "llama",
    ),
    "a body of GET": (typed("text/json", '{"model":"llama"}', "/v1/responses").replace(b"POST", b"GET", 1), "llama"),
    "a query that is escaped twice": (post(b'{"model":"qwen-7b"}', "/v1/completions?model=%256clama"), "%6clama"),
    "token ids": (post(b'{"model":"llama","token_ids":[1]}', "/inference/v1/generate"), "llama"),
    "mlx's draft": (chat("qwen-7b", draft_model="llama"), "llama"),
    "mlx's adapter": (chat("qwen-7b", adapters="poet"), "poet"),
    "a provider's fallbacks": (chat("qwen-7b", models=["llama"]), "llama"),
    "a fallback for long prompts": (chat("qwen-7b", context_window_fallbacks=["llama"]), "llama"),
    "a tool of OpenAI's": (chat("qwen-7b", tools=[{"type": "image_generation", "model": "llama"}]), "llama"),
    "a session's": (post(b'{"session":{"Mod\\u0065l" : "\\u006clama"}}', "/v1/realtime/client_secrets"), "llama"),
    "of two in a session": (post(b'{"a":[{"model":"llama","model":"qwen-7b"}]}', "/v1/evals/e/runs"), "llama"),
    "a large body": (post(json.dumps(LARGE).encode()), "llama"),
    "a form": (form("llama"), "llama"),
    "a query": (audio("/v1/audio/transcriptions?model=%6clama"), "llama"),
    "a query beside a body": (post(b'{"model":"qwen-7b"}', "/v1/chat/completions?Model=llama"), "llama"),
    "a query behind another": (post(b'{"model":"qwen-7b"}', "/v1/chat/completions?a=1;model=llama"), "llama"),
    "a route of tomorrow": (post(b'{"model":"llama"}', "/v1/tomorrow"), "llama"),
    "a form of tomorrow": (form("llama", path="/v1/tomorrow"), "llama"),
    "a WebSocket": (upgrade("/v1/realtime?model=llama"), "llama"),
    "a WebSocket of tomorrow": (upgrade("/v1/tomorrow?model=llama"), "llama"),
    "a WebSocket with two": (upgrade("/v1/realtime?model=qwen-7b;model=llama"), "llama"),
}


@pytest.mark.parametrize("flow", ["", "x-lbproxy-flow: wide\r\n", "x-lbproxy-flow: boss\r\n"])
@pytest.mark.parametrize("what", NOT_ITS_OWN)
def test_all_else_is_as_if_nobody_served_it(what: str, flow: str) -> None:
    request, name = NOT_ITS_OWN[what]

    async def main() -> None:
        async with ScriptedEndpoint() as one, ScriptedEndpoint() as two, rig(one.url, two.url, more=FLOWS) as it:
            guard(it)
            reply = await keyed(it, request, more=flow)
            assert missing(reply, name), reply.body
            assert one.requests == two.requests == []
            (record,) = it.records.requests
            assert (record.outcome, record.model, record.key) == (Outcome.MODEL_NOT_FOUND, name, "ann")
            assert record.flow == (flow.split()[1] if flow else "ann")

    run(main())


def test_the_refusal_is_that_of_a_model_which_nobody_serves() -> None:
    """Head and body, but for the id: to a client with all models, too."""

    async def main() -> None:
        async with ScriptedEndpoint() as one, ScriptedEndpoint() as two, rig(one.url, two.url, more=FLOWS) as it:
            guard(it)
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings"):
                replies = [
                    await keyed(it, post(json.dumps({"model": name}).encode(), path), who)
                    for name, who in (("llama", "ann"), ("nobody", "ann"), ("nobody", "boss"))
                ]
                told = set()
                for reply, record in zip(replies, it.records.requests[-3:], strict=True):
                    text = (reply.head + reply.body).replace(b"llama", b"nobody")
                    lines = text.replace(record.request_id.encode(), b"ID").lower().splitlines()
                    told.add(tuple(line for line in lines if not line.startswith(b"content-length")))
                assert len(told) == 1, told

    run(main())


REFUSED = {
    "two names": (post(b'{"model":"llama","model":"qwen-7b"}'), 400, "invalid_json"),
    "two cases": (post(b'{"Model":"llama","model":"qwen-7b"}'), 400, "invalid_json"),
    "two spellings": (post(b'{"mod\\u0065l":"llama","model":"qwen-7b"}'), 400, "invalid_json"),
    "two names tomorrow": (post(b'{"model":"llama","model":"qwen-7b"}', "/v1/tomorrow"), 400, "invalid_json"),
    "two fields": (form("llama", "qwen-7b"), 400, "missing_model"),
    "a form that is cut": (form("llama", end=" x"), 400, "bad_request"),
    "an adapter without a name": (chat("qwen-7b", lora_path={"x": 1}), 400, "missing_model"),
    "an adapter of TensorRT-LLM": (chat("qwen-7b", lora_request={"lora_name": "poet"}), 400, "missing_model"),
    "a fallback of one": (chat("qwen-7b", content_policy_fallbacks=[{"a": ["llama"]}]), 400, "missing_model"),
    "a name within that is none": (post(b'{"a":{"model":""}}', "/v1/tomorrow"), 400, "missing_model"),
    "more than is looked through": (post(b'{"a":"%b"}' % (b"x" * 262144), "/v1/tomorrow"), 413, "request_too_large"),
    "a list of adapters": (get("/v1/loras"), 403, "forbidden"),
    "a session in a form": (form(path="/v1/realtime/calls"), 403, "forbidden"),
    "batches": (post(b'{"input_file_id":"file-1234"}', "/v1/batches"), 403, "forbidden"),
    "batches by escapes": (post(b"{}", "/v1/%62atches"), 403, "forbidden"),
    "a list of batches": (get("/v1/batches?limit=1"), 403, "forbidden"),
    "a path of models": (get("/v1/engines"), 403, "forbidden"),
    "a model in a path": (post(b"{}", "/v1/engines/llama/completions"), 403, "forbidden"),
    "another list": (get("/v1/internal/model/list"), 403, "forbidden"),
    "a form without parts": (typed("application/x-www-form-urlencoded", "model=llama"), 400, "bad_request"),
    "a list": (typed("application/json", '[{"model":"llama"}]', "/v1/tomorrow"), 400, "invalid_json"),
    "text": (typed("text/plain", '[{"model":"llama"}]'), 400, "bad_request"),
    "JSON as bytes": (typed("application/octet-stream", ' {"model":"llama"}'), 400, "bad_request"),
    "anthropic's batches": (post(b'{"requests":[]}', "/v1/messages/batches"), 403, "forbidden"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_name_any_model_is_refused(what: str) -> None:
    """And is not for a client that may name all of them."""
    request, status, why = REFUSED[what]

    async def main() -> None:
        async with (
            ScriptedEndpoint(answer(b"{}")) as one,
            ScriptedEndpoint(answer(b"{}")) as two,
            rig(one.url, two.url, more=FLOWS) as it,
        ):
            guard(it)
            reply = await keyed(it, request)
            assert (reply.status, code(reply)) == (status, why), reply.body
            assert one.requests == two.requests == []
            if what not in {"two fields", "a form that is cut", "a list"}:
                assert (await keyed(it, request, "boss")).status == 200
            if what == "a form that is cut":
                assert json.loads((await keyed(it, request, "boss")).body)["error"]["code"] == "missing_model"

    run(main())


def test_adapters_are_not_managed_by_such_clients() -> None:
    body = b'{"lora_name":"qwen-x","lora_path":"/weights/poet","base_model_name":"qwen-7b"}'

    async def main() -> None:
        more = f"lora_management: true\n{FLOWS}"
        async with ScriptedEndpoint() as one, ScriptedEndpoint() as two, rig(one.url, two.url, more=more) as it:
            guard(it)
            reply = await keyed(it, post(body, "/v1/load_lora_adapter"))
            assert (reply.status, code(reply)) == (403, "forbidden")
            assert one.requests == two.requests == []

    run(main())


def test_a_request_without_a_model_gets_one_of_its_own_or_none() -> None:
    """Where the only model that is served is another's, it is not told so."""
    nothing = post(b'{"prompt":"x"}', "/v1/completions")

    async def main() -> None:
        async with ScriptedEndpoint() as one, ScriptedEndpoint() as two, rig(one.url, two.url, more=FLOWS) as it:
            guard(it)
            assert (await keyed(it, nothing)).status == 200
            assert b'"model":"qwen-7b"' in one.requests[0].body
            for request in (nothing, get("/v1/tomorrow"), upgrade("/v1/realtime")):
                reply = await keyed(it, request, more="x-lbproxy-flow: none\r\n")
                assert (reply.status, code(reply)) == (400, "missing_model")
                assert b"none is known to be served yet" in reply.body
            assert (len(one.requests), two.requests) == (1, [])

    run(main())


def test_what_a_server_stored_is_found_by_its_id_and_continued_with_its_own_model_only() -> None:
    """Who knows the id of an object may ask for it, as before; but no other model is reached by it."""

    async def main() -> None:
        async with (
            ScriptedEndpoint(answer(b"{}")) as one,
            ScriptedEndpoint(answer(b"{}")) as two,
            rig(one.url, two.url, more=FLOWS) as it,
        ):
            guard(it)
            uids = {one.name: EndpointUid(one.uid) for one in it.endpoints}
            request = it.data_runtime.stored_responses
            request.note("resp_2222", uids["e2"], 0, (), now=it.runtime.now())
            it.runtime.stored_responses.note("resp_2222", uids["e2"], 0, (), now=it.runtime.now())
            assert (await keyed(it, get("/v1/responses/resp_2222"))).status == 200
            assert (len(one.requests), len(two.requests)) == (0, 1)
            body = b'{"model":"qwen-7b","previous_response_id":"resp_2222","input":"x"}'
            assert (await keyed(it, post(body, "/v1/responses"))).status == 200
            assert (len(one.requests), len(two.requests)) == (1, 1)
            body = body.replace(b"qwen-7b", b"coder")
            assert (await keyed(it, post(body, "/v1/responses"))).status == 200
            assert (len(one.requests), len(two.requests)) == (1, 2)

    run(main())


def test_without_keys_the_flow_that_a_request_names_counts() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as one, ScriptedEndpoint() as two, rig(one.url, two.url, more=FLOWS) as it:
            guard(it)
            it.front.requests.keys = None
            reply = await it.ask(chat("llama"))
            assert missing(reply, "llama")
            assert (await it.ask(post(b'{"model":"llama"}', more="x-lbproxy-flow: wide\r\n"))).status == 200

    run(main())


def test_a_reload_changes_what_a_client_may_name() -> None:
    async def main() -> None:
        async with ScriptedEndpoint() as one, ScriptedEndpoint() as two, rig(one.url, two.url, more=FLOWS) as it:
            guard(it)
            urls = [one.url, two.url]
            client = await it.connect()

            async def ask() -> int:
                client.send(post(b'{"model":"llama"}', more=f"Authorization: Bearer {KEYS['ann']}\r\n"))
                return (await client.reply()).status

            assert await ask() == 404
            it.front.reconfigure(settings_for(urls, FLOWS.replace("coder]", "llama]").replace(", coder,", ", llama,")))
            assert await ask() == 200
            reply = await keyed(it, get("/v1/models"))
            assert [entry["id"] for entry in json.loads(reply.body)["data"]] == ["qwen-7b", "llama", "gpt-mini"]
            it.front.reconfigure(settings_for(urls, FLOWS))
            assert await ask() == 404
            assert (await keyed(it, get("/v1/models/llama"))).status == 404
            it.front.reconfigure(settings_for(urls, ""))
            assert await ask() == 200

    run(main())
