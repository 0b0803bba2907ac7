# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Python SDK against a server: every kind of answer once, what came of it as one line of JSON.

    python openai_python.py BASE_URL MODEL

Runs with SDK 1.30 as well as with the newest, each in a Python of its own; `openai_node.mjs` does the same in
JavaScript. The three print the same keys, so one test judges them all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial

import openai
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

PROMPT = "The sky is"
MAX_TOKENS = 24
WITH_USAGE = {"stream_options": {"include_usage": True}}  # 1.30 has no parameter for it


def text_and_usage(chunks: Iterable[object]) -> dict[str, object]:
    """What a stream of chat or completion chunks adds up to."""
    text, usage, finish, count = "", None, None, 0
    for chunk in chunks:
        count += 1
        for choice in getattr(chunk, "choices", None) or []:
            delta = getattr(choice, "delta", None)
            text += (delta.content if delta is not None else choice.text) or ""
            finish = choice.finish_reason or finish
        if getattr(chunk, "usage", None) is not None:
            usage = chunk.usage.completion_tokens  # type: ignore[attr-defined]
    return {"text": text, "tokens": usage, "finish": finish, "chunks": count}


def main(base_url: str, model: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60)
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
    say = partial(client.chat.completions.create, model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0)
    complete = partial(client.completions.create, model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0)
    chat = say()
    chat_stream = text_and_usage(say(stream=True, extra_body=WITH_USAGE))
    plain = complete()
    completion_stream = text_and_usage(complete(stream=True, extra_body=WITH_USAGE))
    try:
        complete(model="no-such-model")
        error = "none"
    except openai.NotFoundError as e:
        error = f"{e.status_code} {e.code}"
    assert chat.usage is not None
    assert plain.usage is not None
    answer = {
        "client": f"openai-python {openai.__version__}",
        "models": [one.id for one in client.models.list()],
        "chat": {"text": chat.choices[0].message.content, "tokens": chat.usage.completion_tokens},
        "chat_stream": chat_stream,
        "completion": {"text": plain.choices[0].text, "tokens": plain.usage.completion_tokens},
        "completion_stream": completion_stream,
        "error": error,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
