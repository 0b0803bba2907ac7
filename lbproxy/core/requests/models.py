"""From the model that a request names to the model that it is placed by, and what is told of the models there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import orjson
import xxhash

from lbproxy.config.sections.models import ModelSettings
from lbproxy.core.requests.openai import ModelCard, made_up_card
from lbproxy.core.requests.outcome import LbError, Outcome


def resolve(model: str | None, base_models: Sequence[str]) -> str:
    """The model to place by: the one named, else the only base model that the endpoints serve.

    Raises LbError MISSING_MODEL if none is named and there is not exactly one. Names are not checked against the
    endpoints here: whether a model is served, the Balancer knows at the moment of placing.
    """
    if model is not None:
        return model
    if len(base_models) == 1:
        return base_models[0]
    why = "more than one is served" if base_models else "none is known to be served yet"
    raise LbError(Outcome.MISSING_MODEL, f"The request names no `model`, and {why}.", param="model")


class Aliases:
    """The settings' own names of models, and what each stands for. Whether that is served is not known here."""

    def __init__(self, settings: Mapping[str, ModelSettings]) -> None:
        self._shares = {name: alias.shares for name, alias in settings.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._shares

    def target(self, name: str, key: str, served: Collection[str]) -> str:
        """The model that a request for the alias `name` is placed by. One `key` gives the same one, in every process.

        Of a split, those take part that are in `served`, or all if none is: a model whose servers are gone leaves its
        share to the others.
        """
        shares = self._shares[name]
        if len(shares) == 1:
            return next(iter(shares))
        there = [model for model, share in shares.items() if share and model in served]
        if not there:
            there = [model for model, share in shares.items() if share]
        drawn = xxhash.xxh3_64_intdigest(f"{name}\0{key}".encode("utf-8", "surrogatepass")) / 2**64
        left = drawn * sum(shares[model] for model in there)
        for model in there[:-1]:
            left -= shares[model]
            if left < 0.0:
                return model
        return there[-1]

    def listed(self, cards: Iterable[ModelCard]) -> list[ModelCard]:
        """`cards` and those of the aliases that lead to one of them. An alias stands for a model of its own name."""
        by_id = {card.id: card for card in cards}
        own = {}
        for name, shares in self._shares.items():
            behind = [by_id[model] for model, share in shares.items() if share and model in by_id]
            if behind:
                own[name] = _card(name, behind)
        return list((by_id | own).values())


def _card(name: str, behind: Sequence[ModelCard]) -> ModelCard:
    """An alias's: with the model that it stands for, if it is one, and the longest context that all of them take."""
    fields: dict[str, object] = {"root": behind[0].id} if len(behind) == 1 else {}
    lengths = [orjson.loads(card.raw).get("max_model_len") for card in behind]
    if all(isinstance(length, int) for length in lengths):
        fields["max_model_len"] = min(lengths)
    return made_up_card(name, **fields)
