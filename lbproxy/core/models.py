"""From the model that a request names to the model that it is placed by."""

from __future__ import annotations

from collections.abc import Sequence

from lbproxy.core.types import LbError, Outcome


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
