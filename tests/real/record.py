# SPDX-License-Identifier: Apache-2.0
"""Records what a real vLLM says on the parts of its API that agents use: `python -m tests.real.record [NAME ...]`.

It starts vLLM servers with the tests' tiny model, one after another and each on one core, and writes exchanges to
tests/fixtures/http/vllm-0.32.0-agents (wire.py has the format). NAMEs pick servers: generate, no-store, embed,
classify.
The environment is that of `make test-real`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.real import servers
from tests.real.environment import Environment, prepare
from tests.real.wire import Exchange, Recorder

FOLDER = Path(__file__).parent.parent / "fixtures" / "http" / "vllm-0.32.0-agents"
MODEL = servers.MODEL
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""With `strict`, in which the arguments are made by this schema; random weights would make something else."""
DESCRIPTION = "The weather in a city."
NAMED = {"name": "weather", "description": DESCRIPTION, "strict": True}
RESPONSES_TOOL = {"type": "function", **NAMED, "parameters": WEATHER}
MESSAGES_TOOL = {**NAMED, "input_schema": WEATHER}
CHAT_TOOL = {"type": "function", "function": {**NAMED, "parameters": WEATHER}}
LONG = " ".join(f"Rule {number}: the answer is short and has no adjectives." for number in range(20))
"""Several cache blocks of 32 tokens."""
ID = r'"id":"(resp_[^"]+)"'


def record_generate(to: Recorder) -> None:
    """A server that stores responses."""
    responses(to)
    response_tools(to)
    stored_responses(to)
    messages(to)
    message_tools(to)
    message_cache(to)
    chat_tools(to)
    small(to)


def responses(to: Recorder) -> None:
    same = {"model": MODEL, "input": "The sky is", "max_output_tokens": 6, "temperature": 0}
    to.post("responses-nonstream", "/v1/responses", same)
    to.post("responses-stream", "/v1/responses", {**same, "stream": True})
    to.post("responses-instructions", "/v1/responses", {**same, "instructions": LONG})
    to.post("responses-instructions-again", "/v1/responses", {**same, "instructions": LONG})
    to.post("responses-instructions-stream", "/v1/responses", {**same, "instructions": LONG, "stream": True})
    to.post("responses-not-stored", "/v1/responses", {**same, "store": False})
    to.post("responses-err-unknown-model", "/v1/responses", {**same, "model": "no-such-model"})
    to.post("responses-err-no-input", "/v1/responses", {"model": MODEL})
    too_long = {**same, "input": LONG * 12}
    to.post("responses-err-too-long", "/v1/responses", too_long)
    to.post("responses-err-too-long-stream", "/v1/responses", {**too_long, "stream": True})


def response_tools(to: Recorder) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Paris"}'}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How is the weather?"}]},
        {**call, "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    same = {"model": MODEL, "max_output_tokens": 60, "temperature": 0, "tools": [RESPONSES_TOOL]}
    to.post("responses-function-call-output", "/v1/responses", {**same, "input": items, "max_output_tokens": 6})
    asked = {**same, "input": "How is the weather?", "tool_choice": "required"}
    to.post("responses-tool-required", "/v1/responses", asked)
    to.post("responses-tool-required-stream", "/v1/responses", {**asked, "stream": True})


def stored_responses(to: Recorder) -> None:
    """Follow-ups, reading by id, cancelling."""
    same = {"model": MODEL, "max_output_tokens": 6, "temperature": 0}
    first = to.post("responses-first", "/v1/responses", {**same, "input": "The sky is"}).find(ID)
    follow = {**same, "input": "And the sea", "previous_response_id": first}
    to.post("responses-follow-up", "/v1/responses", follow)
    to.post("responses-follow-up-stream", "/v1/responses", {**follow, "stream": True})
    to.post("responses-follow-up-unknown", "/v1/responses", {**follow, "previous_response_id": "resp_unknown"})
    to.post("responses-follow-up-not-an-id", "/v1/responses", {**follow, "previous_response_id": "unknown"})
    to.get("responses-get", f"/v1/responses/{first}")
    to.get("responses-get-stream", f"/v1/responses/{first}?stream=true")
    to.get("responses-get-unknown", "/v1/responses/resp_unknown")
    to.get("responses-get-not-an-id", "/v1/responses/unknown")
    to.get("responses-input-items", f"/v1/responses/{first}/input_items")
    to.get("responses-list", "/v1/responses")
    to.post("responses-cancel-finished", f"/v1/responses/{first}/cancel")
    to.post("responses-cancel-unknown", "/v1/responses/resp_unknown/cancel")
    long = {**same, "input": "Count", "max_output_tokens": 1900, "background": True}
    background = to.post("responses-background", "/v1/responses", long).find(ID)
    to.get("responses-background-get", f"/v1/responses/{background}")
    to.post("responses-background-cancel", f"/v1/responses/{background}/cancel")
    to.get("responses-background-get-cancelled", f"/v1/responses/{background}")
    short = {**same, "input": "Count", "background": True}
    done = to.post("responses-background-short", "/v1/responses", short).find(ID)
    wait_for(lambda: to.get("responses-background-get-completed", f"/v1/responses/{done}"), '"status":"completed"')
    stream = to.post("responses-background-stream", "/v1/responses", {**short, "stream": True}).find(ID)
    to.get("responses-background-get-stream", f"/v1/responses/{stream}?stream=true")
    to.get("responses-background-get-stream-rest", f"/v1/responses/{stream}?stream=true&starting_after=6")
    to.post("responses-background-not-stored", "/v1/responses", {**short, "store": False})


def wait_for(ask: Callable[[], Exchange], text: str) -> None:
    """Ask again, at most a minute, until the response has `text`; the last exchange is the one that is kept."""
    end = time.monotonic() + servers.PATIENCE_S
    while text not in (exchange := ask()).body.decode():
        assert time.monotonic() < end, exchange.response
        time.sleep(0.2)


def messages(to: Recorder) -> None:
    same = {"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": "Hi"}]}
    to.post("messages-nonstream", "/v1/messages", same)
    to.post("messages-stream", "/v1/messages", {**same, "stream": True})
    system = [
        {"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "You are kind."},
    ]
    to.post("messages-system", "/v1/messages", {**same, "system": system})
    to.post("messages-system-stream", "/v1/messages", {**same, "system": system, "stream": True})
    to.post("messages-stop-sequence", "/v1/messages", {**same, "max_tokens": 60, "stop_sequences": ["e", "a"]})
    to.post("messages-err-unknown-model", "/v1/messages", {**same, "model": "no-such-model"})
    to.post("messages-err-no-max-tokens", "/v1/messages", {"model": MODEL, "messages": same["messages"]})
    too_long = {**same, "system": LONG * 12}
    to.post("messages-err-too-long", "/v1/messages", too_long)
    to.post("messages-err-too-long-stream", "/v1/messages", {**too_long, "stream": True})
    to.post("count-tokens", "/v1/messages/count_tokens", {"model": MODEL, "messages": same["messages"]})
    counted = {"model": MODEL, "messages": same["messages"], "system": system, "tools": [MESSAGES_TOOL]}
    to.post("count-tokens-system-tools", "/v1/messages/count_tokens", counted)
    to.post("count-tokens-err-unknown-model", "/v1/messages/count_tokens", {**counted, "model": "no-such-model"})


def message_tools(to: Recorder) -> None:
    asked = {"role": "user", "content": "How is the weather?"}
    same = {"model": MODEL, "max_tokens": 60, "temperature": 0, "tools": [MESSAGES_TOOL]}
    choice = {"tool_choice": {"type": "tool", "name": "weather"}, "messages": [asked]}
    to.post("messages-tool", "/v1/messages", {**same, **choice})
    to.post("messages-tool-stream", "/v1/messages", {**same, **choice, "stream": True})
    loose = {**same, "tools": [{**MESSAGES_TOOL, "strict": False}], **choice}
    to.post("messages-tool-err-arguments", "/v1/messages", loose)
    any_tool = {"tool_choice": {"type": "any"}, "messages": [asked]}
    to.post("messages-tool-any", "/v1/messages", {**same, **any_tool})
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}
    turns = [asked, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    to.post("messages-tool-result", "/v1/messages", {**same, "max_tokens": 6, "messages": turns})
    to.post("messages-tool-result-stream", "/v1/messages", {**same, "max_tokens": 6, "messages": turns, "stream": True})


def message_cache(to: Recorder) -> None:
    """Two turns of a conversation whose system prompt is long: is `input_tokens` with or without what was cached?"""
    same = {"model": MODEL, "max_tokens": 6, "temperature": 0, "system": f"A conversation about caches. {LONG}"}
    turns: list[object] = [{"role": "user", "content": "Hi"}]
    first = to.post("messages-turn-1", "/v1/messages", {**same, "messages": turns})
    turns += [{"role": "assistant", "content": first.find(r'"text":"((?:[^"\\]|\\.)*)"')}]
    turns += [{"role": "user", "content": "And now?"}]
    to.post("messages-turn-2", "/v1/messages", {**same, "messages": turns})
    to.post("messages-turn-2-stream", "/v1/messages", {**same, "messages": turns, "stream": True})
    to.post(
        "count-tokens-turn-2",
        "/v1/messages/count_tokens",
        {"model": MODEL, "system": same["system"], "messages": turns},
    )
    chat = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    chat_turns = [{"role": "system", "content": same["system"]}, *turns]
    to.post("chat-turn-2-cached", "/v1/chat/completions", {**chat, "messages": chat_turns})


def chat_tools(to: Recorder) -> None:
    asked = {"role": "user", "content": "How is the weather?"}
    same = {"model": MODEL, "max_tokens": 60, "temperature": 0, "tools": [CHAT_TOOL], "messages": [asked]}
    to.post("chat-tool-required", "/v1/chat/completions", {**same, "tool_choice": "required"})
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    to.post("chat-tool-required-stream", "/v1/chat/completions", {**same, "tool_choice": "required", **usage})
    named = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    to.post("chat-tool-named", "/v1/chat/completions", {**same, **named})
    to.post("chat-tool-named-stream", "/v1/chat/completions", {**same, **named, **usage})


def small(to: Recorder) -> None:
    """What is no generation, and routes that this server does not have or refuses."""
    to.post("tokenize", "/tokenize", {"model": MODEL, "prompt": "The sky is"})
    to.post("tokenize-chat", "/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]})
    to.post("detokenize", "/detokenize", {"model": MODEL, "tokens": [53, 290, 295]})
    to.post("tokenize-err-unknown-model", "/tokenize", {"model": "no-such-model", "prompt": "x"})
    to.post("embeddings-err-generating-model", "/v1/embeddings", {"model": MODEL, "input": "x"})
    to.post("score-err-generating-model", "/score", {"model": MODEL, "text_1": "x", "text_2": "y"})
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--b--\r\n'
    to.send("audio-err-text-model", "/v1/audio/transcriptions", "multipart/form-data; boundary=b", form)
    to.get("realtime-no-upgrade", "/v1/realtime")
    to.upgrade("realtime-handshake", f"/v1/realtime?model={MODEL}")


def record_no_store(to: Recorder) -> None:
    """As vLLM starts by default: is there a store of responses?"""
    same = {"model": MODEL, "input": "The sky is", "max_output_tokens": 6, "temperature": 0}
    first = to.post("no-store-responses", "/v1/responses", same).find(ID)
    to.get("no-store-get", f"/v1/responses/{first}")
    to.post("no-store-cancel", f"/v1/responses/{first}/cancel")
    to.post("no-store-follow-up", "/v1/responses", {**same, "previous_response_id": first})
    to.post("no-store-background", "/v1/responses", {**same, "background": True})
    to.post("no-store-true", "/v1/responses", {**same, "store": True})


def record_embed(to: Recorder) -> None:
    """The same weights as a model that embeds."""
    two = ["The sky is blue", "The sea"]
    to.post("embeddings", "/v1/embeddings", {"model": MODEL, "input": "The sky is"})
    to.post("embeddings-list", "/v1/embeddings", {"model": MODEL, "input": two})
    to.post("embeddings-tokens", "/v1/embeddings", {"model": MODEL, "input": [[53, 290, 295], [53]]})
    to.post("embeddings-base64", "/v1/embeddings", {"model": MODEL, "input": two, "encoding_format": "base64"})
    to.post("embeddings-err-unknown-model", "/v1/embeddings", {"model": "no-such-model", "input": "x"})
    to.post("embeddings-err-too-long", "/v1/embeddings", {"model": MODEL, "input": LONG * 12})
    to.post("embeddings-err-no-input", "/v1/embeddings", {"model": MODEL})
    to.post("score", "/score", {"model": MODEL, "text_1": "The sky", "text_2": two})
    to.post("v1-score", "/v1/score", {"model": MODEL, "text_1": two, "text_2": two})
    to.post("rerank", "/rerank", {"model": MODEL, "query": "The sky", "documents": two})
    to.post("v1-rerank", "/v1/rerank", {"model": MODEL, "query": "The sky", "documents": two, "top_n": 1})
    to.post("v2-rerank", "/v2/rerank", {"model": MODEL, "query": "The sky", "documents": two})
    to.post("pooling", "/pooling", {"model": MODEL, "input": "The sky is"})
    to.post("embed-classify-err", "/classify", {"model": MODEL, "input": "x"})
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    to.post("embed-chat-err", "/v1/chat/completions", chat)


def record_classify(to: Recorder) -> None:
    """The same weights as a model that classifies."""
    to.post("classify", "/classify", {"model": MODEL, "input": ["The sky is blue", "The sea"]})
    to.post("classify-one", "/classify", {"model": MODEL, "input": "The sky is blue"})
    to.post("classify-score", "/score", {"model": MODEL, "text_1": "The sky", "text_2": "The sea"})
    to.post("classify-rerank", "/rerank", {"model": MODEL, "query": "The sky", "documents": ["blue", "wet"]})
    to.post("classify-pooling", "/pooling", {"model": MODEL, "input": "The sky is"})


SERVERS: dict[str, tuple[Callable[[Recorder], None], list[str], dict[str, str]]] = {
    "generate": (
        record_generate,
        servers.TOOLS,
        {"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
    ),
    "no-store": (record_no_store, [], {}),
    "embed": (record_embed, ["--runner", "pooling", "--convert", "embed"], {}),
    "classify": (record_classify, ["--runner", "pooling", "--convert", "classify"], {}),
}


def record(environment: Environment, name: str) -> list[Exchange]:
    """Start one server, record its exchanges, and end it."""
    make, options, variables = SERVERS[name]
    server = servers.vllm(environment, f"record-{name}", "", 0, *options, env=variables)
    servers.LOGS.mkdir(exist_ok=True)
    server.start()
    try:
        server.wait_until_ready()
        recorder = Recorder(server.url, FOLDER)
        make(recorder)
        return recorder.exchanges
    finally:
        server.kill()


def main(names: list[str]) -> None:
    environment = prepare(print)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or SERVERS:
        for exchange in record(environment, name):
            print(f"{name:9} {exchange.status} {exchange.name}: {len(exchange.response)} bytes, {exchange.total_s} s")


if __name__ == "__main__":
    main(sys.argv[1:])
