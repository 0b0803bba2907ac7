"""Settings of flows: whose requests they are, and which share, priority and limits each flow has."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import Field, field_validator

from lbproxy.config.section import Section
from lbproxy.config.values import Quantity, count, duration, expected

MAX_NAMED = 1000
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""As the names of API keys."""

Weight: TypeAlias = Annotated[float, Quantity("0.001", "1000", "a weight", whole=False)]
Priority: TypeAlias = Annotated[int, count("-999", "999")]
Limit: TypeAlias = Annotated[int, count("1", "1000000000")] | None


class FlowSettings(Section):
    """What one flow may have."""

    weight: Weight = 1.0
    """Its share of the work beside the others', while requests of several wait."""
    priority: Priority = 0
    """Of its requests that ask for none by `x-lbproxy-priority`. Higher goes first; below 0 is shed first."""
    max_priority: Priority | None = None
    """The highest that its requests may ask for. null = any, as long as clients need no API key; with keys, `priority`:
    who has a key cannot put itself before the others."""
    in_flight: Limit = None
    """Requests that it has at endpoints at a time; more of them wait. null = no limit."""
    requests_per_minute: Limit = None
    """More is answered 429. So many at once after a quiet minute, then evenly. null = no limit."""
    tokens_per_minute: Limit = None
    """Of prompts and answers, as endpoints count them; 429 while more was used. null = no limit."""


class FlowsSettings(Section):
    """Whose requests are whose, so that one of many cannot take all."""

    header: bool | None = None
    """Requests say by `x-lbproxy-flow` which flow they are of. false = they are of their API key's. null = true as long
    as clients need no API key."""
    half_life: Annotated[float, duration("1s", "1h")] = 30.0
    """Seconds in which half is forgotten of what a flow had beyond its share."""
    default: FlowSettings = FlowSettings()
    """What each flow may have that is not named here, and requests without a flow, together."""
    named: dict[str, FlowSettings] = Field(default={}, json_schema_extra={"maxProperties": MAX_NAMED})
    """The same by the flow's name, which is the API key's or what the header says. What is not said here, `default`
    says."""

    @field_validator("named", mode="after")
    @classmethod
    def _check_names(cls, value: dict[str, FlowSettings]) -> dict[str, FlowSettings]:
        if len(value) > MAX_NAMED:
            raise expected(f"at most {MAX_NAMED} flows")
        for name in value:
            if _NAME.fullmatch(name) is None:
                raise expected("names of 1 to 64 letters, digits and ._-")
        return value

    @property
    def rules(self) -> dict[str, FlowSettings]:
        """Of the flows that are named, with what `default` says for them."""
        return {
            name: self.default.model_copy(update={key: getattr(one, key) for key in one.model_fields_set})
            for name, one in self.named.items()
        }
