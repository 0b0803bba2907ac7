# SPDX-License-Identifier: Apache-2.0
"""Handlers of what reads text and writes none: embeddings, pooling, scores; /tokenize and /detokenize."""

from __future__ import annotations

from functools import partial

import orjson
from aiohttp import web

from lbproxy.sim.mock.apis import pooling
from lbproxy.sim.mock.apis.pooling import PoolingCall
from lbproxy.sim.mock.serving.desk import Desk, fields_of, json_response

_TEXTS = {"/v1/embeddings": "embd", "/pooling": "pooling", "/classify": "classify"}


class RequestHandlers:
    """The handlers of one server."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, partial(self._texts, kind=kind)) for path, kind in _TEXTS.items()),
            *(web.post(path, self._score) for path in ("/score", "/v1/score")),
            *(web.post(path, self._rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _texts(self, request: web.Request, kind: str) -> web.StreamResponse:
        return await self._read(request, pooling.parse_texts(kind, await fields_of(request)))

    async def _score(self, request: web.Request) -> web.StreamResponse:
        return await self._read(request, pooling.parse_score(await fields_of(request)))

    async def _rerank(self, request: web.Request) -> web.StreamResponse:
        return await self._read(request, pooling.parse_rerank(await fields_of(request)))

    async def _read(self, request: web.Request, call: PoolingCall) -> web.StreamResponse:
        choices = await self._desk.prefill(call.prompts, call.model)
        identity = self._desk.identity(request, f"{call.prefix}-", call.model)
        return json_response(pooling.response_body(identity, call, choices))

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        model, text, with_strings = pooling.parse_tokenize(await fields_of(request))
        self._desk.adapter(model)
        return json_response(pooling.tokenize_body(text, self._desk.max_model_len, with_strings=with_strings))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        model, text = pooling.parse_detokenize(await fields_of(request))
        self._desk.adapter(model)
        return json_response(orjson.dumps({"prompt": text}))
