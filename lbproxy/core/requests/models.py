# SPDX-License-Identifier: Apache-2.0
"""The model that a request is placed by, from the model that it names; and the list of models for clients."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Final, cast

import orjson
import xxhash

from lbproxy.config.sections.models import NO_SETTINGS, ModelSettings
from lbproxy.core.requests.openai import ModelCard, check_model_name, synthetic_card
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.core.requests.outline import MODEL_KEY, STRING

LATEST: Final = ":latest"
"""Ollama's tag of a model that is named without one."""
MAX_KNOWN: Final = 1000
"""Pairs of names whose settings are remembered: clients write the first."""
_MAY_NAME: Final = re.compile(rb"(?i:model)|\\u00")
_ALIAS: Final = frozenset({"to", "split"})


def resolve(model: str | None, base_models: Sequence[str]) -> str:
    """Return the model to place by: the named one, else the only base model that the endpoints serve.

    Raises LbError MISSING_MODEL if none is named and there is not exactly one. Whether a named model is served is not
    checked here: the Balancer checks it when it places the request.
    """
    if model is not None:
        return model
    if len(base_models) == 1:
        return base_models[0]
    why = "more than one is served" if base_models else "none is known to be served yet"
    raise LbError(Outcome.MISSING_MODEL, f"The request names no `model`, and {why}.", param="model")


def is_among(model: str, names: Container[str]) -> bool:
    """Whether these have the model by its name, or without the tag that it has, or does not name, at an Ollama."""
    return model in names or model.removesuffix(LATEST) in names or f"{model}{LATEST}" in names


class Allowed:
    """The models that a client may use, by the names that clients write: an alias stands for itself. Immutable."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: some may be patterns with `*`."""
        self._names = frozenset(names)
        parts = [name.split("*") for name in self._names if "*" in name]
        self._beginnings = tuple(first for first, *rest in parts if rest == [""])
        self._patterns = [one for one in parts if one[1:] != [""]]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            ("*" not in name and name in self._names)
            or name.startswith(self._beginnings)
            or any(_fits(name, parts) for parts in self._patterns)
        )


OTHER_NAMES: Final = (
    *("lora_path", "lora_request", "adapters", "draft_model"),
    *("models", "fallbacks", "context_window_fallbacks", "content_policy_fallbacks"),
)
"""Fields of a body that name models too: adapters and drafts of SGLang, TensorRT-LLM and MLX, and what OpenRouter and
LiteLLM fall back to."""


def other_models(fields: Mapping[str, object]) -> list[str]:
    """The models that a JSON body names besides `model`, those of the provider's own tools too (OpenAI's
    `image_generation`, Anthropic's `advisor`). Raises LbError for what is no name.
    """
    named = [(field, fields.get(field)) for field in OTHER_NAMES]
    if isinstance(tools := fields.get("tools"), list):
        named += [("model", one.get("model")) for one in tools if isinstance(one, dict)]
    found = []
    for field, value in named:
        for name in value if isinstance(value, list) else (value,):
            if name is not None:
                check_model_name(name, field)
                found.append(cast(str, name))
    return found


def models_within(text: bytes) -> list[str]:
    """All that a JSON text calls `model`, in any spelling and at any depth, if it is a string: a `model` that is none
    is one of a schema. A megabyte takes 20 to 80 ms, if `model` is in it. Raises orjson.JSONDecodeError for what is no
    text.
    """
    if _MAY_NAME.search(text) is None:
        return []
    values = (STRING.match(text, key.end()) for key in MODEL_KEY.finditer(text))
    return [orjson.loads(value[0]) for value in values if value is not None]


class ModelRules:
    """The `models` of the settings: aliases and the models that they stand for, and other settings of models, by names
    and patterns. Whether a model is served is not known here.
    """

    def __init__(self, settings: Mapping[str, ModelSettings]) -> None:
        self._settings = settings
        self._shares = {name: one.shares for name, one in settings.items() if one.shares}
        names = sorted((name for name in settings if "*" in name), key=len, reverse=True)  # of equal ones the first
        self._patterns = [(name, name.split("*")) for name in names]
        self.has_patterns = not self._shares.keys().isdisjoint(names)
        """Some patterns are aliases."""
        self.has_settings = any(not one.model_fields_set <= _ALIAS for one in settings.values())
        """Some say more than what a name stands for."""
        self._known: dict[tuple[str, str], ModelSettings] = {}

    def __contains__(self, name: object) -> bool:
        """Whether it is an alias. Of a pattern: see `pattern_for`."""
        return name in self._shares

    def pattern_for(self, name: str) -> str | None:
        """The pattern that a name stands for as an alias: the longest one that fits; None if it is a name of `models`,
        or none fits.
        """
        if name not in self._settings or "*" in name:
            for pattern, parts in self._patterns:
                if pattern in self._shares and _fits(name, parts):
                    return pattern
        return None

    def settings_of(self, written: str | None, model: str | None) -> ModelSettings:
        """How requests are served that name `written` and are sent as `model`, which differs if that is an alias. Key
        by key: what is said of the alias goes first, what a name says before a pattern, and a longer pattern before a
        shorter one. None: it names no model, or has none.
        """
        if not self.has_settings or model is None:
            return NO_SETTINGS
        key = (written or model, model)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = known = self._merged(*key)
        return known

    def _merged(self, written: str, model: str) -> ModelSettings:
        said: dict[str, object] = {}
        for name in (written, model):
            alias = None if name == model else self.pattern_for(name)
            for one in (name, *(pattern for pattern, parts in self._patterns if _fits(name, parts))):
                if one in self._settings and (one in {name, alias} or one not in self._shares):
                    found = self._settings[one]
                    said = {key: getattr(found, key) for key in found.model_fields_set - _ALIAS} | said
        return NO_SETTINGS.model_copy(update=said)

    def target(self, name: str, key: str, served: Collection[str]) -> str:
        """Return the model that a request for the alias or pattern `name` is placed by. One `key` gives the same model
        in every process.

        Of a split, the models in `served` take part, or all of them if none is served: a model whose servers are gone
        leaves its share to the others.
        """
        shares = self._shares[name]
        if len(shares) == 1:
            return next(iter(shares))
        candidates = [model for model, share in shares.items() if share and model in served]
        if not candidates:
            candidates = [model for model, share in shares.items() if share]
        drawn = xxhash.xxh3_64_intdigest(f"{name}\0{key}".encode("utf-8", "surrogatepass")) / 2**64
        left = drawn * sum(shares[model] for model in candidates)
        for model in candidates[:-1]:
            left -= shares[model]
            if left < 0.0:
                return model
        return candidates[-1]

    def behind(self, name: str) -> Iterable[str]:
        """The models as which requests for `name`, an alias or none, are sent."""
        shares = self._shares.get(name)
        return (name,) if shares is None else (model for model, share in shares.items() if share)

    def aliases(self) -> Iterable[str]:
        """All that are no patterns."""
        return (name for name in self._shares if "*" not in name)

    def listed(self, cards: Iterable[ModelCard]) -> list[ModelCard]:
        """`cards`, and cards of the aliases that lead to one of them. An alias replaces a model of the same name."""
        by_id = {card.id: card for card in cards}
        own = {}
        for name in self.aliases():
            behind = [by_id[model] for model in self.behind(name) if model in by_id]
            if behind:
                own[name] = _card(name, behind)
        return list((by_id | own).values())


def _fits(name: str, parts: list[str]) -> bool:
    """Whether a name is these parts, at least two, with anything between them. Each is taken where it comes first: a
    regular expression would try all places, and take hours for some.
    """
    at, end = len(parts[0]), len(name) - len(parts[-1])
    if at > end or not (name.startswith(parts[0]) and name.endswith(parts[-1])):
        return False
    for part in parts[1:-1]:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _card(name: str, behind: Sequence[ModelCard]) -> ModelCard:
    """The card of an alias: with its model, if there is one only, and the longest context that all of its models
    take.
    """
    fields: dict[str, object] = {"root": behind[0].id} if len(behind) == 1 else {}
    lengths = [card.context_tokens for card in behind if card.context_tokens is not None]
    if len(lengths) == len(behind):
        fields["max_model_len"] = min(lengths)
    return synthetic_card(name, **fields)
