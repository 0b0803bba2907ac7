# SPDX-License-Identifier: Apache-2.0
"""Settings of models: names of the user's own for what the endpoints serve, and how each is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from lbproxy.config.section import ShortSection
from lbproxy.config.values import Keepalive, Quantity, check_model_name, duration, expected, if_given

MAX_NAMES = 1000
MAX_TARGETS = 32

Share: TypeAlias = Annotated[float, Quantity("0", "1000000", "a weight", whole=False)]
"""Of a split; only proportions matter."""


class ModelSettings(ShortSection):
    """What a model name, or a pattern with `*`, stands for: another model, or several by weight. One of the first two
    keys, or the text of `to`. And how its requests are served: with such settings alone it is a model of the endpoints.
    """

    to: str | None = None
    """The model as which its requests are sent."""
    split: dict[str, Share] | None = None
    """Models and weights: each request is sent as one of them, those of one x-session-id as the same."""
    stream_keepalive: Keepalive | None = None
    """As at the top level."""

    fallback: tuple[str, ...] = Field(default=(), json_schema_extra={"maxItems": MAX_TARGETS})
    """Other models that serve its requests, in order, while none of its endpoints does: docs/failures.md, Another
    model."""
    fallback_after: Annotated[float, duration("0s", "1h")] | None = None
    """Also if a request would wait longer than this, or did. null = it waits."""

    continues: bool | None = Field(default=None, alias="continue")
    """Streams of text go on at another endpoint if their own dies: docs/failures.md, A stream that goes on."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"to": value} if isinstance(value, str) else value

    _check_to = field_validator("to", mode="after")(if_given(check_model_name))

    @field_validator("split", mode="after")
    @classmethod
    def _check_split(cls, value: dict[str, float] | None, info: ValidationInfo) -> dict[str, float] | None:
        if value is not None and info.data.get("to") is not None:
            raise expected("either `to` or `split`")
        if value is not None and (not 1 <= len(value) <= MAX_TARGETS or not sum(value.values())):
            raise expected(f"1 to {MAX_TARGETS} models, at least one with a weight above 0")
        for name in value or ():
            check_model_name(name)
        return value

    @field_validator("fallback", mode="after")
    @classmethod
    def _check_fallback(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(value) > MAX_TARGETS:
            raise expected(f"at most {MAX_TARGETS} models")
        return tuple(dict.fromkeys(map(check_model_name, value)))

    @model_validator(mode="after")
    def _says_something(self) -> ModelSettings:
        if not self.shares and self.model_fields_set <= {"to", "split"}:
            raise expected("`to`, `split` or other settings of a model")
        return self

    @property
    def shares(self) -> Mapping[str, float]:
        """The models for which it is an alias, and their weights; empty if it is none."""
        return self.split or ({} if self.to is None else {self.to: 1.0})


NO_SETTINGS: Final = ModelSettings.model_construct()
"""Of a model that has none."""


def served_names(models: Mapping[str, ModelSettings]) -> list[str]:
    """The names that are models of the endpoints: no aliases, no patterns."""
    return [name for name, one in models.items() if not one.shares and "*" not in name]


def check_models(models: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
    """Raise what is wrong with all of them together."""
    if len(models) > MAX_NAMES:
        raise expected(f"at most {MAX_NAMES} models")
    wrong: list[InitErrorDetails] = []
    aliases = {name for name, one in models.items() if one.shares}
    for name, alias in models.items():
        for target in alias.shares:
            # Names are replaced once, so that a split may send part of a model's requests to itself: a canary.
            if "*" in target or (target in aliases and (target != name or alias.to is not None)):
                place = (name, "to") if alias.split is None else (name, "split", target)
                what = expected("a model that endpoints serve, not an alias")
                wrong.append(InitErrorDetails(type=what, loc=place, input=target))
        for n, other in enumerate(alias.fallback):
            if "*" in other or other in aliases or other == name:
                what = expected("another model that endpoints serve, not an alias")
                wrong.append(InitErrorDetails(type=what, loc=(name, "fallback", n), input=other))
    if wrong:
        raise ValidationError.from_exception_data("models", wrong)
    for name in models:
        check_model_name(name)
    return models
