# SPDX-License-Identifier: Apache-2.0
"""Ollama's Python library: its own API, with streams of JSON lines, lists and errors."""

from __future__ import annotations

import ollama
from checks import QUESTION, UNKNOWN, arguments, check_that, expect, run

URL, MODEL = arguments()
CLIENT = ollama.Client(host=URL, timeout=60)
ASKED = [{"role": "user", "content": QUESTION}]
FEW = {"num_predict": 20, "num_ctx": 8192}


def chat():
    said = CLIENT.chat(model=MODEL, messages=ASKED, options=FEW)
    check_that(said.message.content and said.done and said.eval_count == 20 and said.prompt_eval_count > 0, said)


def chat_streamed():
    *parts, last = CLIENT.chat(model=MODEL, messages=ASKED, options=FEW, stream=True)
    check_that(last.done and last.eval_count == 20 and len(parts) == 20, last)
    text = "".join(part.message.content for part in parts)
    check_that(text == CLIENT.chat(model=MODEL, messages=ASKED, options=FEW).message.content, text)


def generate():
    said = CLIENT.generate(model=MODEL, prompt=QUESTION, system="Be brief.", options=FEW, keep_alive=-1)
    *parts, last = CLIENT.generate(model=MODEL, prompt=QUESTION, system="Be brief.", options=FEW, stream=True)
    check_that(said.response and "".join(part.response for part in parts) == said.response, said)
    check_that(last.eval_count == said.eval_count == 20, last)


def embed():
    found = CLIENT.embed(model=MODEL, input=["one", "two"])
    check_that(len(found.embeddings) == 2 and found.prompt_eval_count > 0, found)
    check_that(len(CLIENT.embeddings(model=MODEL, prompt="one").embedding) == len(found.embeddings[0]), found)


def lists():
    check_that([one.model for one in CLIENT.list().models] == [MODEL], CLIENT.list())
    loaded = CLIENT.ps().models
    check_that([one.model for one in loaded][:1] == [MODEL] and loaded[0].context_length > 0, loaded)
    check_that(CLIENT.show(MODEL).details.format, CLIENT.show(MODEL))


def refused(status, call):
    expect(ollama.ResponseError, call, status)


run(
    "ollama",
    {
        "chat": chat,
        "chat, streamed": chat_streamed,
        "generate": generate,
        "embed": embed,
        "lists": lists,
        "error": lambda: refused(404, lambda: CLIENT.chat(model=UNKNOWN, messages=ASKED)),
        "error, streamed": lambda: refused(404, lambda: list(CLIENT.chat(model=UNKNOWN, messages=ASKED, stream=True))),
        "pull, refused": lambda: refused(403, lambda: CLIENT.pull(MODEL)),
    },
)
