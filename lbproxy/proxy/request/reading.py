# SPDX-License-Identifier: Apache-2.0
"""What a complete request asks for: how the balancer sees it, and the body to send."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from typing import Final, NamedTuple, TypeAlias, cast

import orjson

from lbproxy.config.tree import Settings
from lbproxy.core.endpoints.endpoint import Endpoint
from lbproxy.core.endpoints.health import Health
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.queue.flows import FlowRules
from lbproxy.core.requests.context_length import asked_context
from lbproxy.core.requests.encodable import encodable_text
from lbproxy.core.requests.forms import FormWalk, find_form_name, is_clear, read_form_model
from lbproxy.core.requests.models import LATEST, Allowed, ModelRules, models_within, other_models, resolve
from lbproxy.core.requests.openai import (
    MAX_TOKENS,
    NOT_NAMED,
    BodyFacts,
    ModelCard,
    Naming,
    check_model_name,
    find_names,
    names_models,
    place_for_name,
    read_json_body,
)
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import (
    PARSE_AT_ONCE_BYTES,
    UNCUT_STRING_BYTES,
    LargeJson,
    load_json,
    omitted_bytes,
)
from lbproxy.core.requests.prompt_keys import BlockKey, hash_prompt
from lbproxy.core.requests.prompts import Flattening, Prompt
from lbproxy.core.requests.request import WHOLE, InferenceRequest
from lbproxy.core.responses.objects import named_in_body, named_in_path, refers
from lbproxy.driver.request_runtime import RequestRuntime
from lbproxy.proxy.request.client_request import ClientRequest
from lbproxy.proxy.request.handshake import query_model, query_models, with_query_model
from lbproxy.proxy.request.headers import CONTINUE, FALLBACK, MAX_SESSION_BYTES, RequestFields
from lbproxy.proxy.request.legs import is_splittable, refuse_own_fields
from lbproxy.proxy.request.own_responses import model_not_found
from lbproxy.proxy.request.routes import (
    CUSTOM,
    JSON_BODY,
    OTHER,
    Form,
    Route,
    form_of,
    is_of_any_model,
    is_opaque,
    path_model,
    reads_json,
    stored_response,
    with_path_model,
)

Large: TypeAlias = LargeJson | FormWalk
"""A body that was read in many turns of the event loop."""


class LargeFacts(NamedTuple):
    """What was read of a large body."""

    facts: BodyFacts
    prompt: Prompt | None
    """None if no prompt is needed."""


MAX_ID_CHARS: Final = 160
"""The longest id of a stored response."""
SEARCHED_BYTES: Final = 128 << 10
"""Up to this size a body is searched for the names of ids before its values are looked at, as that takes longer."""
_REFERENCES: Final = frozenset({"file_id", "_ids"})
"""How names end that name objects in a request of inference."""
_CREATES: Final = frozenset({"POST", "PATCH"})
_ANY_MODEL: Final = "Batches, calls and servers' own paths of models are not for clients with models of their own."
_UNNAMED: Final = CUSTOM._replace(is_inference=False)
"""Reads a body as it is."""
SERVED_S: Final = 1.0
"""How long the set of served models is reused: asking all endpoints takes a while."""


class RequestReader:
    """Reads requests by the configured models and flows, and by what the endpoints serve."""

    def __init__(self, settings: Settings, runtime: RequestRuntime, model_rules: ModelRules) -> None:
        self._model_rules = model_rules
        self._flow_rules = FlowRules(settings.flows)
        self._bounds_models = self._flow_rules.bounds_models
        self._keepalive_s = settings.stream_keepalive
        self._has_keepalive = (
            self._keepalive_s > 0.0
            or any(one.stream_keepalive for one in (settings.flows.default, *settings.flows.named.values()))
            or any(one.stream_keepalive for one in settings.models.values())
        )
        """Some clients get it without asking."""
        self._continues = any(one.continues for one in settings.models.values())
        self._runtime = runtime
        self._served: frozenset[str] = frozenset()
        self._served_until = float("-inf")

    def interpret(
        self, request: ClientRequest, record: RequestRecord, large: LargeFacts | None = None
    ) -> tuple[ClientRequest, InferenceRequest]:
        """Return the request to send, and the request as the balancer sees it. Notes in `record` what is asked for.

        `large`: the content of its body, if that was read in turns. Raises LbError.
        """
        if request.fields.upgrade:
            return self._socket(request, record)
        if large is None:
            facts, request = self.read(request, record)
            flatten = request.route.flatten
            prompt = None if flatten is None or self._runtime.block_bytes is None else flatten(facts.fields)
        else:
            facts, prompt = large
        record.model, record.stream = facts.model, facts.stream
        placed = self._placed(record, request, facts, prompt, is_large=large is not None)
        if request.route.engine is not None:
            placed = placed._replace(engine=request.route.engine, context_tokens=asked_context(facts.fields))
        if self._model_rules.has_settings:
            request, placed = self._with_fallbacks(request, placed, record)
        if self._bounds_models and facts.model is None:
            request = request._replace(naming=Naming(()))  # it is placed by a model all the same, and names none
        if self._continues or request.fields.switches:
            request = request._replace(continues=self._continues_of(request, placed, record))
        if self._has_keepalive or request.fields.keepalive_s:
            request = request._replace(keepalive_s=self._keepalive_of(request, record))
        return request, placed

    def _continues_of(self, request: ClientRequest, placed: InferenceRequest, record: RequestRecord) -> bool:
        """Whether its stream goes on elsewhere if its endpoint dies."""
        if not (request.route.continues and request.method == "POST" and placed.stream):
            return False
        said = request.fields.switch(CONTINUE)
        return bool(self._model_rules.settings_of(record.alias, record.model).continues if said is None else said)

    def _keepalive_of(self, request: ClientRequest, record: RequestRecord) -> float:
        """Seconds of silence after which its client gets a comment; 0 = never. HTTP/1.0 has no chunks to add one, and
        lines of JSON no comments.
        """
        if request.http10 or request.method == "HEAD" or request.route.engine is not None:
            return 0.0
        said = request.fields.keepalive_s
        if said is None:
            said = self._flow_rules.keepalive_of(record.flow or "", record.key)
        if said is None:
            said = self._model_rules.settings_of(record.alias, record.model).stream_keepalive
        return self._keepalive_s if said is None else said

    def read(
        self, request: ClientRequest, record: RequestRecord, large: Large | None = None
    ) -> tuple[BodyFacts, ClientRequest]:
        """The content of the body, with the model to place by (None: any endpoint); and the request, with the model
        to ask for if the body names none or another one. Notes in `record` the client's name of the model, if that is
        an alias.

        `large`: the body, if that was read in turns. Raises LbError.
        """
        allowed = self.allowed(request.fields, record) if self._bounds_models else ()
        facts, request = self._read(request, large, allowed)
        if allowed:
            self._check_models(request, facts, record, large, allowed)
        if request.route.engine is not None:
            facts = self._of_engine(request.route, facts)
        name = facts.model
        if name is None:
            return facts, request
        model = tagged = self._tagged(name)
        if tagged in self._model_rules or self._model_rules.has_patterns:
            model = self._tagged(self._model_behind(tagged, request, record))
        if model != name:
            facts = facts._replace(model=model)
        if model == tagged:  # an Ollama knows it by either
            return facts, request
        return facts, request._replace(model=model, naming=_naming_of(request, large))

    def _tagged(self, model: str) -> str:
        """A model by the name that endpoints list: Ollamas list it with a tag, which requests may leave out."""
        serving = self._runtime.serving
        if ":" in model or serving.has_listed(model) or model in self._model_rules:
            return model
        latest = f"{model}{LATEST}"
        return latest if serving.has_listed(latest) else model

    # Clients that have models of their own

    def allowed(self, fields: RequestFields, record: RequestRecord) -> tuple[Allowed, ...]:
        """The models that the client of a request may name, see FlowRules. Notes the flow in `record`."""
        if not self._bounds_models:
            return ()
        record.flow = flow = self._flow_rules.flow_of(record.key, fields.flow)
        return self._flow_rules.models_of(flow, record.key)

    def _check_models(
        self,
        request: ClientRequest,
        facts: BodyFacts,
        record: RequestRecord,
        large: Large | None,
        allowed: tuple[Allowed, ...],
    ) -> None:
        """Raise LbError unless each model that a server may read in the request is allowed. That is decided by names
        alone: the client is not told, by words or time, which others there are.
        """
        body, kind = request.body, request.fields.content_type
        named = [] if facts.model is None else [facts.model]
        if is_of_any_model(request.target) and path_model(request.route, request.target) is None:
            raise LbError(Outcome.FORBIDDEN, _ANY_MODEL)
        if has_json(request):
            _refuse_two_models(request)
            if request.route.name == OTHER:
                named += _named_within(body)
        elif has_form(request):
            if not is_clear(body, kind, large if isinstance(large, FormWalk) else None):
                raise LbError(Outcome.BAD_REQUEST, "The form is malformed: servers may read different models in it.")
        elif body and not is_opaque(request.route.body, kind, body):
            raise LbError(Outcome.BAD_REQUEST, "The body is neither a JSON object nor a form with parts.")
        self._require(named + query_models(request.target) + other_models(facts.fields), record, allowed)

    @staticmethod
    def _require(names: list[str], record: RequestRecord, allowed: tuple[Allowed, ...]) -> None:
        for name in names:
            for one in allowed:
                if name not in one:
                    record.model = name
                    raise model_not_found(name)

    def _place_within(
        self, request: ClientRequest, record: RequestRecord, model: str | None, response_id: str | None
    ) -> tuple[str | None, str | None]:
        """Where a request may go whose client may not name every model: the model to place it by, and the stored object
        by which it is placed. One that names no model goes where one of the client's is served, or to what it is about;
        one that does not to a server without it, whatever it refers to.
        """
        allowed = self.allowed(request.fields, record)
        if not allowed or (model is None and request.route.engine is not None):
            return model, response_id
        stored = None if response_id is None else self._runtime.stored(response_id)
        if model is None:
            return (self._any_of(allowed) if stored is None else None), response_id
        if stored is not None:
            owners = [one.models for one in self._runtime.members() if one.endpoint.uid == stored.uid]
            if owners and owners[0] is not None and model not in owners[0]:
                return model, None
        return model, response_id

    def _any_of(self, allowed: tuple[Allowed, ...]) -> str:
        """A served model that these lead to. Raises LbError if there is none."""
        cards = self._runtime.serving.model_cards()
        served = {card.id for card in cards}
        for card in self._model_rules.listed(cards):
            if all(card.id in one for one in allowed):
                for model in self._model_rules.behind(card.id):
                    if model in served:
                        return model
        return resolve(None, [])

    def _only_model(self, named: str | None, allowed: tuple[Allowed, ...]) -> str:
        """The model that a request of inference names, or else the only one that its client may."""
        if named is not None:
            return named
        served = self._runtime.serving.base_models()
        return resolve(None, [one for one in served if all(one in each for each in allowed)] if allowed else served)

    def _with_fallbacks(
        self, request: ClientRequest, placed: InferenceRequest, record: RequestRecord
    ) -> tuple[ClientRequest, InferenceRequest]:
        """The same with the models that may serve it instead, by the settings and its client: not what refers to
        something that one server has.
        """
        said = self._model_rules.settings_of(record.alias, placed.model)
        rules, flow, key = self._flow_rules, placed.flow, record.key
        if not said.fallback or not request.route.is_inference or placed.response_id is not None:
            return request, placed
        if not (request.fields.upgrade or has_json(request) or has_form(request)):
            return request, placed  # nothing names its model that could be replaced
        allowed = rules.models_of(flow, key) if self._bounds_models else ()
        others = tuple(one for one in said.fallback if one != placed.model and all(one in models for models in allowed))
        if not others or not rules.may_fall_back(flow, request.fields.switch(FALLBACK), key):
            return request, placed
        after_s = inf if said.fallback_after is None else said.fallback_after
        return request._replace(fallbacks=others), placed._replace(fallback_after_s=after_s)

    def _model_behind(self, name: str, request: ClientRequest, record: RequestRecord) -> str:
        """The model to place by. Notes the client's name in `record`, if that stands for another one."""
        alias: str | None = name
        if name not in self._model_rules:
            alias = None if self._runtime.serving.has_listed(name) else self._model_rules.pattern_for(name)
        if alias is None:
            return name
        record.alias = name
        return self._model_rules.target(alias, request.fields.session or record.request_id, self._served_now())

    def waits_for_lists(self) -> bool:
        """Whether a model may match a pattern that an endpoint will list in a moment: the first probe is not over."""
        return self._model_rules.has_patterns and any(
            one.health is Health.STARTING and one.models is None for one in self._runtime.members()
        )

    def flattening(self, request: ClientRequest, facts: BodyFacts) -> Flattening | None:
        """Begin to flatten the prompt of a large body; None if no prompt is needed."""
        flatten = request.route.flatten
        return None if flatten is None or self._runtime.block_bytes is None else flatten.begin(facts.fields)

    def _placed(
        self,
        record: RequestRecord,
        request: ClientRequest,
        facts: BodyFacts,
        prompt: Prompt | None,
        *,
        is_large: bool = False,
    ) -> InferenceRequest:
        block_bytes, fields = self._runtime.block_bytes, request.fields
        model, stream, max_tokens, cache_salt, read = facts
        prompt_bytes = media_tokens = least_tokens = 0
        keys: tuple[BlockKey, ...] = ()
        response_id, stores, repeatable = None, False, request.route.is_inference or request.method not in _CREATES
        if (
            request.route.flatten is None
            or not request.route.is_common
            or "store" in read
            or (self._runtime.stored_responses and _refers(request.body, read, "file_id"))
        ):
            response_id, stores = self._storage(request, read)
            repeatable = repeatable and not read.get("background")  # it would run to its end each time
        if block_bytes is not None and prompt is not None:
            text, media_tokens, least_tokens = prompt
            prompt_bytes = len(text)
            before = None if response_id is None else self._runtime.stored(response_id)
            after = () if before is None else before.block_keys
            if prompt_bytes >= block_bytes or after:
                if is_large and len(request.body) > UNCUT_STRING_BYTES:
                    prompt_bytes += omitted_bytes(text, len(request.body))
                keys = hash_prompt(text, model=model, salt=cache_salt, block_bytes=block_bytes, after=after)
            if before is not None:
                prompt_bytes += before.prompt_bytes
        if self._bounds_models:
            model, response_id = self._place_within(request, record, model, response_id)
        record.flow = flow = self._flow_rules.flow_of(record.key, fields.flow)
        slo_s = fields.slo_ttft_s
        return InferenceRequest(
            record.id,
            model,
            stream,
            len(request.body),
            prompt_bytes,
            keys,
            max_tokens,
            self._flow_rules.priority_of(flow, fields.priority, record.key),
            fields.session or _cache_key(read),
            fields.explain,
            flow,
            None if slo_s is None else record.started_at + slo_s,
            media_tokens,
            response_id,
            stores,
            repeatable,
            bool(request.body) and not has_json(request),
            False,
            self._runtime.splits and _may_be_split(request, read),
            WHOLE,
            0,
            self._flow_rules.max_tier_of(flow, fields.max_tier, record.key),
            least_tokens,
        )

    def _storage(self, request: ClientRequest, fields: Mapping[str, object]) -> tuple[str | None, bool]:
        """The stored object that a request is about, a response that it continues, or another that it names: one whose
        server is known, if there is one. And whether its own response may be stored, or show what is.
        """
        path, route = request.target.partition("?")[0], request.route
        about = stored_response(path)
        named = [] if about is None else [about]
        if route.name == OTHER:
            named += named_in_path(path)
        before = _name(fields.get("previous_response_id"), MAX_ID_CHARS)
        if before is not None:
            named.append(before)
        if (
            route.name == OTHER
            or "conversation" in fields
            or (self._runtime.stored_responses and _refers(request.body, fields, *_REFERENCES))
        ):
            named += named_in_body(fields)
        known = next((one for one in named if self._runtime.stored(one) is not None), None)
        if route.flatten is None:
            return known or next(iter(named), None), route.name == OTHER
        store = fields.get("store")
        stores = request.method == "POST" and (store is True or (store is not False and not route.is_common))
        return known or next(iter(named), None), stores

    def _socket(self, request: ClientRequest, record: RequestRecord) -> tuple[ClientRequest, InferenceRequest]:
        """The same for a WebSocket, whose model is in the query. It is not recorded as a stream: its first message does
        not show how soon a prompt is processed.
        """
        if request.route.pattern is not None:
            raise LbError(Outcome.BAD_REQUEST, "No WebSocket is opened on this path.")
        named = query_model(request.target)
        model = named
        allowed = self.allowed(request.fields, record) if self._bounds_models else ()
        if allowed:
            if is_of_any_model(request.target):
                raise LbError(Outcome.FORBIDDEN, _ANY_MODEL)
            self._require(([] if named is None else [named]) + query_models(request.target), record, allowed)
        if named is None and request.route.is_inference:
            model = self._only_model(None, allowed)
        elif named is not None:
            model = self._model_behind(named, request, record)
        if model is not None and model != named:
            request = request._replace(target=with_query_model(request.target, model))
        record.model = model
        placed = self._placed(record, request, BodyFacts(model, True), None)._replace(open_ended=True)
        return self._with_fallbacks(request, placed, record)

    def model_cards(self) -> list[ModelCard]:
        """The models that clients may name: those of the endpoints that are up, and aliases of them."""
        return self._model_rules.listed(self._runtime.serving.model_cards())

    def _read(
        self, request: ClientRequest, large: Large | None, allowed: tuple[Allowed, ...]
    ) -> tuple[BodyFacts, ClientRequest]:
        """The same, with the name that the client used; if it used none, the only one that is served and `allowed`."""
        if request.route.pattern is not None:
            return self._read_custom(request, large, allowed)
        body = request.body
        is_inference = request.route.is_inference
        if has_json(request):
            facts = read_json_body(body, large if isinstance(large, LargeJson) else None)
            if facts.model is None and is_inference:
                model = self._only_model(_older_name(request.route, facts.fields), allowed)
                return facts._replace(model=model), request._replace(model=model, naming=place_for_name(body))
            if isinstance(large, LargeJson) and (outline := large.outline) is not None:
                naming = NOT_NAMED if outline.has_long_model else find_names(body, outline)
                request = request._replace(naming=naming)
            return facts, request
        if has_form(request):
            walk = large if isinstance(large, FormWalk) else None
            named = read_form_model(body, request.fields.content_type, walk)
            if walk is not None:
                request = request._replace(naming=_naming_of(request, walk))
            return BodyFacts(self._only_model(named, allowed) if is_inference else named), request
        if not (is_inference and body):
            return BodyFacts(None), request
        named = query_model(request.target)  # what is neither JSON nor a form has no other place for it
        return BodyFacts(self._only_model(named, allowed)), request

    def _of_engine(self, route: Route, facts: BodyFacts) -> BodyFacts:
        """The same by the rules of Ollama's API. Raises LbError if no endpoint has it."""
        engine = route.engine
        assert engine is not None
        if not any(one.has_api(engine) for one in self._runtime.members()):
            raise LbError(Outcome.UNKNOWN_URL)
        fields = facts.fields
        options = fields.get("options")
        most = options.get("num_predict") if isinstance(options, dict) else None
        limit = most if type(most) is int and 0 < most < MAX_TOKENS else None
        stream = route.flatten is not None and fields.get("stream") is not False
        return facts._replace(stream=stream, max_tokens=limit)

    def _read_custom(
        self, request: ClientRequest, large: Large | None, allowed: tuple[Allowed, ...]
    ) -> tuple[BodyFacts, ClientRequest]:
        """The same on a path of `inference_paths`: where its server reads no model, none is put in."""
        route, said = request.route, request.fields.model
        facts, read = self._read(request._replace(route=_UNNAMED), large, allowed)
        in_path = path_model(route, request.target)
        if allowed and in_path is not None and facts.model not in {None, in_path}:
            raise LbError(Outcome.BAD_REQUEST, "The path names one model and the body another.")
        named = in_path or facts.model
        if named is not None and said not in {None, named}:
            raise LbError(Outcome.BAD_REQUEST, "x-lbproxy-model is another model than the one that the request names.")
        model = named or said
        if model is None and request.method == "POST":
            model = self._only_model(None, allowed)
        if in_path is not None or facts.model is None:
            read = read._replace(naming=Naming(()))
        return facts._replace(model=model), read._replace(route=route)

    def _served_now(self) -> frozenset[str]:
        """The models of endpoints that are up, as of the last second."""
        now = self._runtime.now()
        if now >= self._served_until:
            self._served_until = now + SERVED_S
            self._served = frozenset(card.id for card in self._runtime.serving.model_cards())
        return self._served


def _older_name(route: Route, fields: Mapping[str, object]) -> str | None:
    """Ollama's older name of the field for a model. Raises LbError."""
    names = [value for key, value in fields.items() if key.lower() == "name"] if route.engine is not None else []
    if not names:
        return None
    check_model_name(names[0] if len(names) == 1 else None)
    return cast("str", names[0])


_KEEP_ALIVE: Final = re.compile(rb'(?i)_alive"|\\u00')


def _without_keep_alive(request: ClientRequest) -> ClientRequest:
    """The request without Ollama's `keep_alive`: of several the last one counts, in whatever case, and null is none."""
    body = request.body
    if len(body) <= PARSE_AT_ONCE_BYTES and _KEEP_ALIVE.search(body) is None:
        return request
    return request._replace(body=body.rstrip().removesuffix(b"}") + b',"keep_alive":null}')


_STREAM_OPTIONS: Final = re.compile(rb'"stream_options"|\\u00[567]')
MAX_ASKED_BYTES: Final = 1 << 20
"""A larger body is not searched, and not copied."""


def with_usage(request: ClientRequest) -> ClientRequest | None:
    """The request for a stream, which asks for the usage at its end; None: it does so already, or may be large. Of
    `stream_options` the last ones count, also in engines; what the client set there is kept.
    """
    size = sum(map(len, request.pieces)) or len(request.body)
    if size > MAX_ASKED_BYTES:
        return None
    body = request.in_one_piece().body
    options: object = {}
    if _STREAM_OPTIONS.search(body) is not None:
        fields = load_json(body) if size <= PARSE_AT_ONCE_BYTES else None
        options = (fields.get("stream_options") or {}) if isinstance(fields, dict) else None
    if not isinstance(options, dict) or options.get("include_usage"):
        return None
    asked = orjson.dumps({**options, "include_usage": True})
    return request._replace(body=body.rstrip().removesuffix(b"}") + b',"stream_options":%b}' % asked, pieces=())


def for_model(
    request: ClientRequest, placed: InferenceRequest, model: str, block_bytes: int | None
) -> tuple[ClientRequest, InferenceRequest]:
    """The same request for another model. Of a prompt in a large body the blocks are not known then: to read it again
    would take long.
    """
    keys: tuple[BlockKey, ...] = ()
    flatten, body = request.route.flatten, request.body
    if placed.block_keys and flatten is not None and block_bytes is not None and len(body) <= PARSE_AT_ONCE_BYTES:
        facts = read_json_body(body)
        text = flatten(facts.fields).text
        keys = hash_prompt(text, model=model, salt=facts.cache_salt, block_bytes=block_bytes)
    named = placed._replace(model=model, block_keys=keys, fallback_from=placed.model)
    return request._replace(model=model), named


def as_named_by(endpoint: Endpoint, request: ClientRequest) -> ClientRequest:
    """The request with the model's name for `endpoint`: its own, if it has one. Raises LbError INVALID_JSON for a body
    that names a model too often, or in too many bytes.
    """
    model = endpoint.model or request.model
    if request.route.engine is not None and not endpoint.client_keep_alive:
        request = _without_keep_alive(request)
    if model is None:
        if endpoint.tier > 1 and has_json(request):
            _refuse_two_models(request)
        return request
    if request.fields.upgrade:
        return request._replace(target=with_query_model(request.target, model))
    if path_model(request.route, request.target) is not None:
        return request._replace(target=with_path_model(request.route, request.target, model))
    body = request.body
    pieces = _naming_of(request).named(body, model)
    if len(body) > PARSE_AT_ONCE_BYTES:
        return request._replace(body=b"", pieces=pieces, model=None, naming=None)
    return request._replace(body=b"".join(pieces), model=None, naming=None)


def _named_within(body: bytes) -> list[str]:
    """The models that a JSON body names at any depth, as those of sessions and of evaluations. Raises LbError."""
    if len(body) > PARSE_AT_ONCE_BYTES:
        raise LbError(Outcome.TOO_LARGE, "The body is too large here for a client with models of its own.")
    try:
        named = models_within(body)
    except orjson.JSONDecodeError:
        raise LbError(Outcome.INVALID_JSON, "A `model` in the JSON body is no text.") from None
    for name in named:
        check_model_name(name)
    return named


def _refuse_two_models(request: ClientRequest) -> None:
    """Raise LbError INVALID_JSON for a second `model`: that is the one which another kind of server may read."""
    naming = request.naming
    if names_models(request.body) if naming is None or naming is NOT_NAMED else len(naming.spans) > 1:
        raise LbError(Outcome.INVALID_JSON, "The JSON body has more than one `model`.")


def _naming_of(request: ClientRequest, large: Large | None = None) -> Naming:
    """Where the body names its model, if it is one that is read. Raises LbError INVALID_JSON."""
    if request.naming is NOT_NAMED:
        raise LbError(Outcome.INVALID_JSON, "The JSON body has a `model` that is too long to be replaced.")
    if request.naming is not None:
        return request.naming
    if has_json(request):
        return find_names(request.body)
    if has_form(request):
        walk = large if isinstance(large, FormWalk) else None
        return find_form_name(request.body, request.fields.content_type, walk)
    return Naming(())


def _refers(body: bytes, fields: Mapping[str, object], *endings: str) -> bool:
    """Whether a request may name an object, under a name that ends so."""
    if len(body) > SEARCHED_BYTES:
        return refers(fields, *endings)
    return any(body.find(f'{one}"'.encode()) >= 0 for one in endings)


def _may_be_split(request: ClientRequest, fields: Mapping[str, object]) -> bool:
    """Whether prefill and decode of it can be apart. Raises LbError if it has fields that only lbproxy may set, on
    whichever route: a server may have more of them than are known here.
    """
    refuse_own_fields(fields, request.body)
    return request.method == "POST" and is_splittable(request.route.name, fields, request.body)


def _cache_key(fields: Mapping[str, object]) -> str | None:
    """OpenAI's name for requests that share a prompt: used like a session, if the client names none."""
    return _name(fields.get("prompt_cache_key"), MAX_SESSION_BYTES)


def _name(value: object, most_chars: int) -> str | None:
    """A name that a body gives something; None if it is none."""
    if not isinstance(value, str) or not 0 < len(value) <= most_chars:
        return None
    return encodable_text(value)


def has_json(request: ClientRequest) -> bool:
    """Whether its body must be read as JSON: see `proxy.request.routes`. Of a POST also one that is empty."""
    route = request.route
    if not request.body and (request.method != "POST" or not route.is_inference):
        return False
    return route.body is JSON_BODY or reads_json(route.body, request.method, request.fields.content_type, request.body)


def has_form(request: ClientRequest) -> bool:
    """Whether its body must be read as a form."""
    return bool(request.body) and form_of(request.route.body, request.fields.content_type) is Form.MULTIPART
