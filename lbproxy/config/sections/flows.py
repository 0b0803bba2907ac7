# SPDX-License-Identifier: Apache-2.0
"""Settings of flows: whose requests they are, and which share, priority and limits each flow has."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, TypeAlias

from pydantic import Field, field_validator

from lbproxy.config.section import Section
from lbproxy.config.values import Keepalive, Quantity, check_model_name, count, duration, expected

MAX_NAMED = 1000
MAX_MODELS = 100
"""Of one flow: each name that a client writes may be compared with all of its patterns."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""As the names of API keys."""

Weight: TypeAlias = Annotated[float, Quantity("0.001", "1000", "a weight", whole=False)]
Priority: TypeAlias = Annotated[int, count("-999", "999")]
Limit: TypeAlias = Annotated[int, count("1", "1000000000")] | None


class FlowSettings(Section):
    """Share, priority and limits of one flow."""

    weight: Weight = 1.0
    """Its share of the work relative to other flows that wait."""
    priority: Priority = 0
    """Of its requests without `x-lbproxy-priority`. Higher goes first; the lowest is refused first."""
    max_priority: Priority | None = None
    """Highest that its requests may set. null = any; with API keys `priority`, so that no client puts itself before
    others."""
    in_flight: Limit = None
    """Its requests in flight at endpoints; more wait. null = no limit."""
    requests_per_minute: Limit = None
    """More get 429; after an idle minute this many at once."""
    tokens_per_minute: Limit = None
    """Of prompts and responses, as endpoints count them; 429 while more were used."""

    max_tier: Annotated[int, count("1", "9")] | None = None
    """The highest tier for its requests: 1 keeps prompts on the first. Holds for the API key of that name, too,
    whichever flow its requests choose."""
    models: tuple[str, ...] | None = Field(default=None, json_schema_extra={"maxItems": MAX_MODELS})
    """The models that its clients see and may name: names, aliases among them, and patterns with `*`. null = all. Holds
    for the API key of that name, too, like `max_tier`."""
    stream_keepalive: Keepalive | None = None
    """As at the top level, also for the API key of that name."""

    fallback: bool | None = None
    """false: its requests get no other model. Holds for the API key, too, like `max_tier`. null = as the model says."""

    @field_validator("models", mode="after")
    @classmethod
    def _check_models(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and len(value) > MAX_MODELS:
            raise expected(f"at most {MAX_MODELS} models")
        return None if value is None else tuple(map(check_model_name, value))


class FlowsSettings(Section):
    """Fair shares of capacity between the flows of different clients."""

    header: bool | None = None
    """Whether `x-lbproxy-flow` selects the flow. false = the flow is the name of the API key. null = true if clients
    need no key."""
    half_life: Annotated[float, duration("1s", "1h")] = 30.0
    """Time in which half of what a flow got beyond its share is forgotten."""
    default: FlowSettings = FlowSettings()
    """For each flow that is not named here. Requests without a flow are one flow together."""
    named: dict[str, FlowSettings] = Field(default={}, json_schema_extra={"maxProperties": MAX_NAMED})
    """By the flow's name, which is the API key's or the header's. What is missing here is that of `default`."""

    @field_validator("named", mode="after")
    @classmethod
    def _check_names(cls, value: dict[str, FlowSettings]) -> dict[str, FlowSettings]:
        if len(value) > MAX_NAMED:
            raise expected(f"at most {MAX_NAMED} flows")
        for name in value:
            if _NAME.fullmatch(name) is None:
                raise expected("names of 1 to 64 letters, digits and ._-")
        return value

    def unused(self, keys: Collection[str]) -> list[str]:
        """What to say of each named flow to which no request can belong. `keys`: the names of all API keys; empty =
        none is needed.
        """
        if self.header or (self.header is None and not keys):
            return []
        known = keys or ("anonymous",)  # core.queue.flow.ANONYMOUS
        why = "no API key has this name, and `flows.header` is off, so it applies to nothing"
        return [f"flows.named.{name}: {why}" for name in self.named if name not in known]

    @property
    def rules(self) -> dict[str, FlowSettings]:
        """Of the flows that are named, with what `default` says for them."""
        return {
            name: self.default.model_copy(update={key: getattr(one, key) for key in one.model_fields_set})
            for name, one in self.named.items()
        }
