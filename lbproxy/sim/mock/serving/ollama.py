# SPDX-License-Identifier: Apache-2.0
"""The simulated server as Ollama: its own API, in lines of JSON, and which model it has loaded since when.

Fields are those of Ollama's documentation of its API. Loading is the engine's (`sim.engine.on_demand`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial

import orjson
from aiohttp import web

from lbproxy.sim.engine.on_demand import OnDemandEngine
from lbproxy.sim.mock.apis.call import GenerationCall, Identity, PlannedChoice, Writer, at_least_one, prompt_tokens_of
from lbproxy.sim.mock.apis.chat import chat_prompt
from lbproxy.sim.mock.apis.conversation import Turns, render
from lbproxy.sim.mock.apis.fields import EngineError, Json, dump, integer, required, stops, text_of, typed
from lbproxy.sim.mock.serving.desk import Desk, fields_of, json_response
from lbproxy.sim.mock.text import embedding

VERSION = "0.14.0"
CONTEXT = 4096
"""Of a model that is loaded without `num_ctx`, unless `--max-model-len` says another."""
KEEP_S = 300.0
DIMENSIONS = 16


class _Lines(Writer):
    """One response; streamed, in lines."""

    content_type: str = "application/x-ndjson"

    def __init__(self, identity: Identity, *, chat: bool) -> None:
        self._identity, self._chat = identity, chat

    def _said(self, text: str) -> Json:
        body: Json = {"model": self._identity.model, "created_at": _stamp(time.time())}
        return body | ({"message": {"role": "assistant", "content": text}} if self._chat else {"response": text})

    def token(self, choice: PlannedChoice, index: int, position: int) -> bytes:
        return dump(self._said(choice.answer.token(position)) | {"done": False}) + b"\n"

    def closing(self, choices: Sequence[PlannedChoice], cached_tokens: int) -> bytes:
        return self.whole(choices, cached_tokens, text="") + b"\n"

    def whole(self, choices: Sequence[PlannedChoice], cached_tokens: int, text: str | None = None) -> bytes:
        """The last line, or all of a response that is no stream."""
        said = choices[0].answer
        counts = {
            "done": True,
            "done_reason": said.finish_reason,
            "total_duration": 1,
            "load_duration": 1,
            "prompt_eval_count": prompt_tokens_of(choices),
            "prompt_eval_duration": 1,
            "eval_count": said.tokens,
            "eval_duration": 1,
        }
        return dump(self._said(said.text.decode("ascii") if text is None else text) | counts)

    def failed(self, error: EngineError) -> bytes:
        return orjson.dumps({"error": error.message}) + b"\n"


class Ollama:
    """The handlers of one server."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._models = (desk.options.model, *desk.options.adapters)
        self._context = desk.options.max_model_len or CONTEXT
        self._wanted: dict[str, tuple[int, float]] = {}
        """What was asked for last of each model: the length of its context, and until when (seconds since 1970)."""

    def routes(self) -> list[web.RouteDef]:
        posts: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "/api/chat": partial(self._generate, chat=True),
            "/api/generate": partial(self._generate, chat=False),
            "/api/embed": partial(self._embed, name="input"),
            "/api/embeddings": partial(self._embed, name="prompt"),
            "/api/show": self._show,
        }
        gets = {"/": self._root, "/api/version": self._version, "/api/tags": self._tags, "/api/ps": self._ps}
        return [
            *(web.post(path, partial(_in_ollamas_form, handler)) for path, handler in posts.items()),
            *(web.get(path, handler) for path, handler in gets.items()),
        ]

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        fields = await fields_of(request)
        options = self._load(fields)
        if chat:
            prompt, _ = chat_prompt(fields)
        else:
            prompt = _prompt(fields)
        limit = integer(options, "num_predict")
        call = GenerationCall(
            model=text_of(fields, "model"),
            prompts=(prompt,),
            max_tokens=None if limit is not None and limit < 0 else at_least_one(limit, "num_predict"),
            stop=stops(options),
            seed=integer(options, "seed"),
            stream=fields.get("stream") is not False,
        )
        lines = _Lines(self._desk.identity(request, "", call.model), chat=chat)
        return await self._desk.generate(request, {}, call, lines)

    async def _embed(self, request: web.Request, *, name: str) -> web.StreamResponse:
        fields = await fields_of(request)
        self._load(fields)
        given = required(fields, name)
        texts = [str(one).encode() or b"." for one in (given if isinstance(given, list) else [given])]
        work = await self._desk.prefill(texts, text_of(fields, "model"))
        found = [embedding(text, DIMENSIONS) for text in texts]
        if name == "prompt":
            return json_response(dump({"embedding": found[0]}))
        body = {"model": text_of(fields, "model"), "embeddings": found, "total_duration": 1, "load_duration": 1}
        return json_response(dump(body | {"prompt_eval_count": prompt_tokens_of(work)}))

    def _load(self, fields: Json) -> Json:
        """Have the model loaded as a request wants it. Returns its options. Raises EngineError."""
        model = str(required(fields, "model"))
        self._desk.adapter(model)
        options = typed(fields, "options", dict, "dictionary") or {}
        keep = fields.get("keep_alive")
        keep_s = float(keep) if isinstance(keep, int | float) else KEEP_S
        keep_s = keep_s if keep_s >= 0 else 1e9
        self._wanted[model] = integer(options, "num_ctx") or self._context, time.time() + keep_s
        engine = self._desk.driver.engine
        assert isinstance(engine, OnDemandEngine)
        engine.keep(model, keep_s)
        return options

    async def _show(self, request: web.Request) -> web.StreamResponse:
        fields = await fields_of(request)
        self._desk.adapter(text_of(fields, "model") or text_of(fields, "name"))
        info = {"general.architecture": "sim", "sim.context_length": self._desk.max_model_len}
        return json_response(dump({"modelfile": "", "template": "", "details": _DETAILS, "model_info": info}))

    async def _root(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="Ollama is running")

    async def _version(self, _request: web.Request) -> web.StreamResponse:
        return json_response(dump({"version": VERSION}))

    async def _tags(self, _request: web.Request) -> web.StreamResponse:
        return json_response(dump({"models": [_entry(name) | {"modified_at": _stamp(0)} for name in self._models]}))

    async def _ps(self, _request: web.Request) -> web.StreamResponse:
        engine, loaded = self._desk.driver.engine, []
        assert isinstance(engine, OnDemandEngine)
        for name in engine.resident():
            context, until = self._wanted.get(name, (self._context, time.time() + KEEP_S))
            loaded.append(_entry(name) | {"expires_at": _stamp(until), "size_vram": 1, "context_length": context})
        return json_response(dump({"models": loaded}))


def _entry(name: str) -> Json:
    return {"name": name, "model": name, "size": 1, "digest": "0" * 64, "details": _DETAILS}


_DETAILS: Json = {
    "parent_model": "",
    "format": "gguf",
    "family": "sim",
    "families": ["sim"],
    "parameter_size": "8B",
    "quantization_level": "Q4_K_M",
}


def _prompt(fields: Json) -> bytes:
    turns = Turns()
    if system := text_of(fields, "system"):
        turns.add("system", system.encode())
    turns.add("user", (text_of(fields, "prompt") or "").encode())
    return render(turns.turns, [])


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


async def _in_ollamas_form(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], request: web.Request
) -> web.StreamResponse:
    """The handler, with its refusals worded as Ollama's clients read them."""
    try:
        return await handler(request)
    except EngineError as error:
        return json_response(orjson.dumps({"error": error.message}), error.status)
