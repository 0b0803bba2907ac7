# SPDX-License-Identifier: Apache-2.0
"""Handlers of what reads text and writes none: embeddings, pooling, scores; /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import orjson
from aiohttp import web

from lbproxy.sim.mock.apis import pooling
from lbproxy.sim.mock.apis.fields import Json
from lbproxy.sim.mock.apis.pooling import PoolingCall
from lbproxy.sim.mock.serving.desk import Desk, fields_of, json_response

_READERS: Mapping[str, Callable[[Json], PoolingCall]] = {
    "/v1/embeddings": partial(pooling.parse_texts, "embd"),
    "/pooling": partial(pooling.parse_texts, "pooling"),
    "/classify": partial(pooling.parse_texts, "classify"),
    **dict.fromkeys(("/score", "/v1/score"), pooling.parse_score),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), pooling.parse_rerank),
}


class RequestHandlers:
    """The handlers of one server."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, partial(self._read, parse)) for path, parse in _READERS.items()),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _read(self, parse: Callable[[Json], PoolingCall], request: web.Request) -> web.StreamResponse:
        call = parse(await fields_of(request))
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
