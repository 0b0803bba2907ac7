# SPDX-License-Identifier: Apache-2.0
"""The tables in docs/ say what the code says: settings, failures, presets, options of the simulator.

Each is generated here from the code and compared with the page, so that a new key or outcome cannot be forgotten. The
failure message says how to write them anew.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

import httpx2  # what the openai SDK judges a response by
import pytest
from openai import OpenAI
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lbproxy.config.descriptions import descriptions
from lbproxy.config.sections.access import AdminSettings, KeySettings, ListenSettings, TlsSettings
from lbproxy.config.sections.clients import Address
from lbproxy.config.sections.endpoints import EndpointSettings, EndpointTls
from lbproxy.config.sections.engines import EngineSettings
from lbproxy.config.sections.flows import FlowSettings
from lbproxy.config.sections.models import ModelSettings
from lbproxy.config.sleep import ColdStartSettings, HostSettings
from lbproxy.config.tree import Settings
from lbproxy.config.values import Quantity
from lbproxy.core.endpoints.health import TABLE, Event, Health
from lbproxy.core.observed.record import RequestRecord
from lbproxy.core.policies.scorers import SCORERS
from lbproxy.core.requests.outcome import LbError, Outcome
from lbproxy.proxy.request.own_responses import error_response
from lbproxy.sim.engine.presets import BLOCK_TOKENS, PRESETS
from lbproxy.sim.mock.faults import COMMON, KINDS, Parameter
from tests.support.docs import DOCS, expect_generated, generated, table

UNITS = {
    "a duration": (("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 0.001)),
    "a size": (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)),
}


def parts(annotation: object) -> Iterator[object]:
    """An annotation and all that it is made of, metadata included."""
    yield annotation
    for part in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from parts(part)


def quantity(field: FieldInfo) -> Quantity | None:
    found = [part for part in (*field.metadata, *parts(field.annotation)) if isinstance(part, Quantity)]
    return found[0] if found else None


def written(value: object, unit: Quantity | None) -> str:
    """A value as a settings file would have it."""
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "`null`"
    if isinstance(value, tuple) and value:
        return f"`[{', '.join(map(str, value))}]`"
    if value in ({}, ()):
        return "`{}`" if value == {} else "`[]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        for name, factor in UNITS.get(unit.what.partition(" (")[0], ()) if unit else ():
            if value >= factor and (name not in "hm" or value >= 2 * 3600) and (value / factor).is_integer():
                return f"`{value / factor:g}{name}`"
        return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
    return f"`{value}`" if str(value) else "-"


MOST_WORDS = 6
"""Further ones are not listed: the page that describes them does."""


def takes(field: FieldInfo) -> str:
    """What else may be written there, where the default does not show it: words, a range, null."""
    unit = quantity(field)
    words = [str(word) for part in parts(field.annotation) if get_origin(part) is Literal for word in get_args(part)]
    if dict in {get_origin(part) for part in parts(field.annotation)} or len(words) > MOST_WORDS:
        found = []
    elif words:
        found = [word for word in words if word != field.default]
    elif unit is not None:
        besides = unit.what.partition(", or a ")
        most = "" if unit.at_most.isdigit() and int(unit.at_most) >= 1_000_000 else unit.at_most
        found = [besides[0]] if besides[1] else []
        usual = (unit.at_least, unit.at_most) == ("1ms", "24h")  # as the page says
        found += [] if usual else [f"{unit.at_least}..{most}"]
    else:
        found = ["true, false"] if bool in parts(field.annotation) and field.default is None else []
    nothing = ["null"] if type(None) in parts(field.annotation) and field.default is not None else []
    return ", ".join([*found, *nothing])


def is_section(field: FieldInfo) -> bool:
    kind = field.annotation
    return isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Address)


def settings_list(section: type[BaseModel], prefix: str = "") -> str:
    """A line for each of its own keys: those of `Address` stand with `listen`."""
    lines = []
    for name, field in section.model_fields.items():
        if is_section(field) or (section is AdminSettings and name in Address.model_fields):
            continue
        assert name in descriptions(section), f"{prefix}{name} has no docstring"
        default, more = written(field.default, quantity(field)), takes(field)
        text = " ".join(descriptions(section)[name].split())
        lines.append(f"- **{prefix}{field.alias or name}**: {default}{f' ({more})' if more else ''}. {text}\n")
    return "".join(lines)


SECTIONS: dict[str, tuple[type[BaseModel], str]] = {
    "top level": (Settings, ""),
    "listen": (ListenSettings, "listen."),
    "tls": (TlsSettings, "listen.tls."),
    "admin": (AdminSettings, "admin."),
    "key": (KeySettings, ""),
    "endpoints": (EndpointSettings, ""),
    "endpoint tls": (EndpointTls, "tls."),
    "cold start": (ColdStartSettings, "cold_start."),
    "hosts": (HostSettings, ""),
    "engines": (EngineSettings, ""),
    "models": (ModelSettings, ""),
    "flow": (FlowSettings, ""),
    **{
        name: (field.annotation, f"{name}.")
        for name, field in Settings.model_fields.items()
        if is_section(field) and isinstance(field.annotation, type)
    },
}


@pytest.mark.parametrize("name", SECTIONS)
def test_configuration_has_every_key(name: str) -> None:
    """With the default, the range and the reason that the schema has."""
    section, prefix = SECTIONS[name]
    expect_generated(DOCS / "configuration.md", name, settings_list(section, prefix))


# --- Failures ---------------------------------------------------------------------------------------------------------


TYPES = {429: "rate_limit_error", 504: "timeout_error"}
RETRIED, WITH_A_TIME = {408, 429, 500, 503}, {429, 503}
"""By status, as the page says above the table: what OpenAI's SDK retries, as no header keeps it from; Retry-After."""


def failure_begins(outcome: Outcome) -> str:
    """An outcome with its status; the answer that lbproxy writes for it is as the page says of all with that status."""
    facts = outcome.value
    if not facts.status:
        return f"- `{outcome.label}` (endpoint's): "
    record = RequestRecord("id", "POST", "/v1/completions", "127.0.0.1", 0.0)
    answer = error_response(LbError(outcome), record, keep_alive=not facts.close, rng=random.Random(0))
    status_line, *lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    status = int(status_line.split()[1])
    assert facts.error_type == TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    retried = OpenAI(api_key="none")._should_retry(httpx2.Response(status, headers=fields))
    assert retried == (status in RETRIED), outcome
    assert fields.get("x-should-retry") == (None if status in RETRIED else "false"), outcome
    assert ("retry-after" in fields) == (status in WITH_A_TIME), outcome
    closed = ", closed" if fields.get("connection") == "close" else ""
    return f"- `{outcome.label}` ({status}{closed}): "


def test_failures_has_every_outcome_as_it_is_answered() -> None:
    """When it happens is a human's."""
    page = DOCS / "failures.md"
    when = dict(re.findall("^(- .*?: )(.*)$", generated(page, "outcomes"), re.MULTILINE))
    begins = [failure_begins(outcome) for outcome in Outcome]
    expect_generated(page, "outcomes", "".join(f"{one}{when.get(one, '')}\n" for one in begins))
    assert all(when.get(one) for one in begins), "say when it happens"


def test_failures_draws_the_state_machine() -> None:
    """The table of `core.endpoints.health`, as a picture."""
    arrows = [f"    {before.value} --> {after.value}: {event.value}" for (before, event), after in TABLE.items()]
    picture = ["```mermaid", "stateDiagram-v2", "    [*] --> starting", *arrows, "```", ""]
    expect_generated(DOCS / "failures.md", "states", "\n".join(picture))
    states = {state for (before, _), after in TABLE.items() for state in (before, after)}
    assert states == set(Health)
    assert {event for _, event in TABLE} == set(Event)
    for event in Event:
        assert re.search(rf"^- [a-z, ]*{event.value}", (DOCS / "failures.md").read_text(), re.MULTILINE), event


# --- The simulator ----------------------------------------------------------------------------------------------------


def test_simulator_has_every_preset() -> None:
    heads = ["preset", "host", "weights", "token", "sequence", "context", "attention", "KV tokens", "longest", "budget"]
    rows = [
        [
            f"`{name}`",
            *(f"{value:g}" for value in (p.host_ms, p.weights_ms, p.token_ms, p.sequence_ms, p.context_ms)),
            f"{p.attention_ms:g}",
            *(f"{value:,}" for value in (p.kv_tokens, p.max_model_len)),
            f"{p.token_budget} / {p.max_sequences}",
        ]
        for name, p in PRESETS.items()
    ]
    expect_generated(DOCS / "simulator.md", "presets", table(heads, rows))


def parameter_text(name: str, parameter: Parameter) -> str:
    takes = (
        "text"
        if name == "having"
        else ", ".join(parameter.words) or f"{parameter.at_least:g} to {parameter.at_most:,.15g}"
    )
    default = f" ({parameter.default})" if parameter.default else ""
    return f"`{name}` {takes}{default}: {parameter.what}"


def test_simulator_has_every_fault() -> None:
    lines = []
    for kind, (what, parameters) in KINDS.items():
        taken = "; ".join(parameter_text(*one) for one in parameters.items())
        lines.append(f"- `{kind}` {what}{f'. {taken}' if taken else ''}\n")
    expect_generated(DOCS / "simulator.md", "faults", "".join(lines))
    lines = [f"- {parameter_text(*one)}\n" for one in COMMON.items()]
    expect_generated(DOCS / "simulator.md", "common", "".join(lines))


def test_simulator_names_the_block_size() -> None:
    assert f"{BLOCK_TOKENS} tokens" in (DOCS / "simulator.md").read_text()


def test_routing_names_every_policy_and_scorer() -> None:
    """The lists of policies and scorers there are written by hand."""
    listed = re.findall(r"^- `([\w-]+)`", (DOCS / "routing.md").read_text(), re.MULTILINE)
    policies = get_args(Settings.model_fields["routing"].annotation.model_fields["policy"].annotation)  # type: ignore[union-attr]
    for name in (*policies, *SCORERS):
        assert name in listed, f"routing.md has no line for {name}"
