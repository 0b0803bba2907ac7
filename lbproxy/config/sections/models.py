# SPDX-License-Identifier: Apache-2.0
"""Settings of models: names of the user's own for what the endpoints serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails

from lbproxy.config.section import ShortSection
from lbproxy.config.values import Quantity, check_model_name, expected

MAX_ALIASES = 1000
MAX_TARGETS = 32

Share: TypeAlias = Annotated[float, Quantity("0", "1000000", "a weight", whole=False)]
"""Of a split; only proportions matter."""


class ModelSettings(ShortSection):
    """What a model name, or a pattern with `*`, stands for: another model, or several by weight. One of the two keys,
    or the text of `to`.
    """

    to: str | None = None
    """The model as which its requests are sent."""
    split: dict[str, Share] | None = None
    """Models and weights: each request is sent as one of them, those of one x-session-id as the same."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"to": value} if isinstance(value, str) else value

    @field_validator("to", mode="after")
    @classmethod
    def _check_to(cls, value: str | None) -> str | None:
        return None if value is None else check_model_name(value)

    @field_validator("split", mode="after")
    @classmethod
    def _check_split(cls, value: dict[str, float] | None, info: ValidationInfo) -> dict[str, float] | None:
        if (value is None) == (info.data.get("to") is None) and "to" in info.data:
            raise expected("either `to` or `split`")
        if value is not None and (not 1 <= len(value) <= MAX_TARGETS or not sum(value.values())):
            raise expected(f"1 to {MAX_TARGETS} models, at least one with a weight above 0")
        for name in value or ():
            check_model_name(name)
        return value

    @property
    def shares(self) -> Mapping[str, float]:
        """The models and their weights."""
        return self.split if self.split is not None else {self.to or "": 1.0}


def check_aliases(aliases: dict[str, ModelSettings]) -> dict[str, ModelSettings]:
    """Raise what is wrong with all of them together."""
    if len(aliases) > MAX_ALIASES:
        raise expected(f"at most {MAX_ALIASES} models")
    wrong: list[InitErrorDetails] = []
    for name, alias in aliases.items():
        for target in alias.shares:
            # Names are replaced once, so that a split may send part of a model's requests to itself: a canary.
            if "*" in target or (target in aliases and (target != name or alias.to is not None)):
                place = (name, "to") if alias.split is None else (name, "split", target)
                what = expected("a model that endpoints serve, not a name of `models`")
                wrong.append(InitErrorDetails(type=what, loc=place, input=target))
    if wrong:
        raise ValidationError.from_exception_data("models", wrong)
    for name in aliases:
        check_model_name(name)
    return aliases
