# SPDX-License-Identifier: Apache-2.0
"""Request bodies in all their forms, good and bad."""

import orjson
import pytest

from lbproxy.sim.mock.apis import chat, pooling
from lbproxy.sim.mock.apis.call import GenerationCall, plan
from lbproxy.sim.mock.apis.fields import EngineError, Json, load_json
from lbproxy.sim.mock.text import to_token_ids


def parse_completion(fields: Json) -> GenerationCall:
    return chat.parse_completion(fields)[0]


def parse_chat(fields: Json) -> GenerationCall:
    return chat.parse_chat(fields)[0]


def test_prompt_forms_that_mean_the_same_become_the_same_bytes() -> None:
    """Text and its token ids have to share blocks in the prefix cache."""
    text = "Hello, world"
    ids = to_token_ids(text.encode())
    forms: list[object] = [text, [text], ids, [ids]]
    assert {parse_completion({"prompt": form}).prompts for form in forms} == {(text.encode(),)}
    assert parse_completion({"prompt": [text, "b"]}).prompts == (text.encode(), b"b")


def test_chat_content_may_come_in_parts_of_which_unknown_ones_count_nothing() -> None:
    def prompt(content: object) -> bytes:
        return parse_chat({"messages": [{"role": "user", "content": content}]}).prompts[0]

    parts = [
        {"type": "text", "text": "a"},
        {"type": "made_up", "thing": {"url": "x"}},
        {"type": "text", "text": "b"},
    ]
    assert prompt(parts) == prompt("ab")
    assert prompt(None) == prompt("")
    assert b"user" in prompt("")


def test_defaults_and_names_of_the_output_limit() -> None:
    chat: Json = {"messages": [{"role": "user", "content": "x"}]}
    assert parse_completion({"prompt": "x"}).max_tokens == 16
    assert parse_chat(chat).max_tokens is None
    assert parse_chat({**chat, "max_tokens": 7}).max_tokens == 7
    assert parse_chat({**chat, "max_tokens": 7, "max_completion_tokens": 9}).max_tokens == 9


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "body.prompt"),
        ({"prompt": 5}, "body.prompt"),
        ({"prompt": [1, "a"]}, "body.prompt"),
        ({"prompt": [-1]}, "body.prompt"),
        ({"prompt": [2**32]}, "body.prompt"),
        ({"prompt": [1.5]}, "body.prompt"),
        ({"prompt": [["a"]]}, "body.prompt"),
        ({"prompt": ["a", {}]}, "body.prompt"),
        ({"prompt": [""]}, None),
        ({"prompt": []}, None),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "body.max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "body.max_tokens"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 5000}, "n"),
        ({"prompt": ["x"] * 3000}, "prompt"),
        ({"prompt": "x", "stop": ["a"] * 65}, "body.stop"),
        ({"prompt": "x", "stop": [""]}, "body.stop"),
        ({"prompt": "x", "stop": 5}, "body.stop"),
        ({"prompt": "x", "stream": "yes"}, "body.stream"),
        ({"prompt": "x", "stream_options": 1}, "body.stream_options"),
        ({"prompt": "x", "model": 1}, "body.model"),
    ],
)
def test_bad_completions_are_refused_and_say_where(fields: Json, param: str | None) -> None:
    with pytest.raises(EngineError) as caught:
        parse_completion(fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.body()) < 500


@pytest.mark.parametrize(
    "messages",
    [None, "x", [{"content": "x"}], ["x"], [{"role": 1, "content": "x"}], [{"role": "user", "content": 5}]],
)
def test_bad_messages_are_refused(messages: object) -> None:
    with pytest.raises(EngineError) as caught:
        parse_chat({"messages": messages})
    assert str(caught.value.param).startswith("body.messages")


def test_errors_are_worded_as_vllm_words_them() -> None:
    """The recorded bodies of vLLM 0.32 for the same mistakes."""
    with pytest.raises(EngineError) as caught:
        parse_chat({"model": "tiny"})
    assert orjson.loads(caught.value.body()) == {
        "error": {
            "message": "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
            "'input': '<dict of 1 items>'}",
            "type": "Bad Request",
            "param": "body.messages",
            "code": 400,
        }
    }
    call = parse_completion({"prompt": "x", "max_tokens": 5000})
    with pytest.raises(EngineError) as caught:
        plan(call, max_model_len=1024, seed=0)
    assert caught.value.message == (
        "max_tokens=5000 cannot be greater than max_model_len=1024. Please request fewer output tokens. "
        "(parameter=max_tokens, value=5000)"
    )
    call = parse_completion({"prompt": "x" * 8000, "max_tokens": 1})
    with pytest.raises(EngineError) as caught:
        plan(call, max_model_len=1024, seed=0)
    assert caught.value.message == (
        "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        "(parameter=input_tokens, value=1025)"
    )


def test_prompt_and_output_together_must_fit() -> None:
    fits = parse_completion({"prompt": "x" * 400, "max_tokens": 924})
    assert plan(fits, max_model_len=1024, seed=0)[0].answer.tokens == 924
    with pytest.raises(EngineError, match="925 output tokens"):
        plan(parse_completion({"prompt": "x" * 400, "max_tokens": 925}), max_model_len=1024, seed=0)


def test_work_in_one_call_is_bounded() -> None:
    call = parse_completion({"prompt": "x", "n": 2000, "max_tokens": 10_000})
    with pytest.raises(EngineError, match="tokens in one request"):
        plan(call, max_model_len=20_000, seed=0)


def test_choices_are_n_for_each_prompt_and_count_each_prompt_once() -> None:
    call = parse_completion({"prompt": ["aaaa", "bbbbbbbb"], "n": 2, "max_tokens": 3})
    choices = plan(call, max_model_len=100, seed=0)
    assert [choice.prompt_tokens for choice in choices] == [1, 1, 2, 2]
    assert len({choice.answer.text for choice in choices}) > 1
    used = chat.usage(choices, call.n, 0)
    assert (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]) == (3, 12, 15)


def test_ignore_eos_without_a_limit_goes_to_the_end_of_the_model() -> None:
    fields: Json = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    choice = plan(parse_chat(fields), max_model_len=500, seed=0)[0]
    assert choice.prompt_tokens + choice.answer.tokens == 500
    assert choice.answer.finish_reason == "length"


def test_tokenize_and_detokenize_are_inverse() -> None:
    _, text, _ = pooling.parse_tokenize({"prompt": "Hello world"})
    assert pooling.parse_detokenize({"tokens": to_token_ids(text)}) == (None, "Hello world")
    _, rendered, _ = pooling.parse_tokenize({"messages": [{"role": "user", "content": "Hi"}]})
    assert rendered == parse_chat({"messages": [{"role": "user", "content": "Hi"}]}).prompts[0]
    for bad in ({}, {"tokens": "a"}, {"tokens": ["a"]}, {"tokens": [2**40]}):
        with pytest.raises(EngineError):
            pooling.parse_detokenize(dict(bad))


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b"[" * 100_000])
def test_what_is_no_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(EngineError) as caught:
        load_json(body)
    assert caught.value.status == 400
