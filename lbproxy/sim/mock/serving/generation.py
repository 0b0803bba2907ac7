# SPDX-License-Identifier: Apache-2.0
"""Handlers of what generates text: chat, completions, Anthropic's messages, audio, and the engines' own APIs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiohttp import web

from lbproxy.sim.mock.apis import audio, chat, messages, native
from lbproxy.sim.mock.apis.call import GenerationCall
from lbproxy.sim.mock.apis.fields import EngineError
from lbproxy.sim.mock.sabotage import Handler
from lbproxy.sim.mock.serving.desk import Desk, fields_of, json_response
from lbproxy.sim.mock.text import token_count


class Generation:
    """The handlers of one server."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        """The routes that this server has: the own APIs of an engine only if it plays that engine."""
        routes = [
            web.post("/v1/chat/completions", partial(self._openai, parse=chat.parse_chat)),
            web.post("/v1/completions", partial(self._openai, parse=chat.parse_completion)),
            web.post("/v1/messages", _in_anthropics_form(self._message)),
            web.post("/v1/messages/count_tokens", _in_anthropics_form(self._count)),
            web.post("/v1/audio/transcriptions", partial(self._transcribe, task="transcribe")),
            web.post("/v1/audio/translations", partial(self._transcribe, task="translate")),
            web.post("/v1/audio/speech", self._speak),
        ]
        if self._desk.options.engine == "vllm":
            routes.append(web.post("/inference/v1/generate", self._tokens))
        if self._desk.options.engine == "sglang":
            routes.append(web.post("/generate", self._sglang))
        if self._desk.options.engine == "llamacpp":
            for path, infill in (("/completion", False), ("/completions", False), ("/infill", True)):
                routes.append(web.post(path, partial(self._llamacpp, infill=infill)))
        return routes

    async def _openai(
        self, request: web.Request, parse: Callable[..., tuple[GenerationCall, chat.ResponseForm]]
    ) -> web.StreamResponse:
        fields = await fields_of(request)
        call, form = parse(fields)
        identity = self._desk.identity(request, "chatcmpl-" if form.chat else "cmpl-", call.model)
        writer = chat.ChatWriter(identity, form, self._desk.options.stream_interval)
        return await self._desk.generate(request, fields, call, writer)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        fields = await fields_of(request)
        call = messages.parse(fields)
        writer = messages.MessageWriter(self._desk.identity(request, "chatcmpl-", call.model))
        return await self._desk.generate(request, fields, call, writer)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        model, prompt = messages.parse_count(await fields_of(request))
        self._desk.adapter(model)
        return json_response(messages.count_body(token_count(len(prompt))))

    async def _transcribe(self, request: web.Request, task: str) -> web.StreamResponse:
        fields = audio.parse_form(await request.read(), request.headers.get("Content-Type", ""))
        call, form = audio.parse(task, fields)
        writer = audio.TranscriptionWriter(self._desk.identity(request, f"{task}-", call.model), form)
        return await self._desk.generate(request, {}, call, writer)

    async def _speak(self, request: web.Request) -> web.StreamResponse:
        model, text = audio.parse_speech(await fields_of(request))
        await self._desk.prefill([text.encode() or b"."], model)
        return web.Response(body=audio.wav(text), content_type="audio/wav")

    async def _sglang(self, request: web.Request) -> web.StreamResponse:
        fields = await fields_of(request)
        call, several = native.parse_generate(fields)
        writer = native.GenerateWriter(self._desk.identity(request, "", call.model), several=several)
        return await self._desk.generate(request, fields, call, writer)

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        fields = await fields_of(request)
        call, include_usage = native.parse_tokens(fields)
        identity = self._desk.identity(request, "generate-tokens-", call.model)
        writer = native.TokensWriter(identity, include_usage=include_usage)
        return await self._desk.generate(request, fields, call, writer)

    async def _llamacpp(self, request: web.Request, infill: bool) -> web.StreamResponse:
        call = native.parse_llamacpp(await fields_of(request), infill=infill)
        writer = native.LlamacppWriter(self._desk.identity(request, "cmpl-", call.model))
        return await self._desk.generate(request, {}, call, writer)


def _in_anthropics_form(handler: Handler) -> Handler:
    """The handler, with its refusals worded as Anthropic's clients read them."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except EngineError as error:
            return json_response(messages.error_body(error), error.status)

    return handle
