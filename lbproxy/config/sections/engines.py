# SPDX-License-Identifier: Apache-2.0
"""How settings say where a model server shows its load: specs of metrics, and the `engines` key.

A *spec* names the series of one family that hold a signal: `family`, or `family{label=value,label2="v"}`. A signal is
given by one spec, by a list of them (tried in order, since engines rename their families), or, for the utilisation of
the cache, by two: what is used and what there is. What the specs then select on a page is `core.engines.readings`'s.

Every spec is parsed here, once: what cannot be parsed is a settings error with its path, never a signal that is
silently absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, field_validator
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from lbproxy.config.section import Section
from lbproxy.config.values import PATH, ShownUrl, count, expected

LBPROXY = "lbproxy"
"""Another lbproxy."""
OLLAMA = "ollama"
"""Has an API of its own, and no metrics."""
LM_STUDIO = "lmstudio"
"""Likewise."""
BUILT_IN_ENGINES = (
    *("vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm", "llamacpp", "lmdeploy"),
    *(LBPROXY, OLLAMA, LM_STUDIO),
)
"""The keys of `core.engines.dialects.ENGINES` (a test holds the two together: config may not import core)."""
MAX_ENGINES = 64
"""Of one's own. A page of an unknown engine is looked through for the families of each."""
MAX_SPECS = 16
"""Of one signal."""

AboveOne: TypeAlias = Literal["clamp", "per_cent", "ignore"]
"""What a utilisation above 1 is: 1 (rounding), per cent, or no utilisation at all."""

_LABEL = re.compile(r'\s*+([a-zA-Z_][a-zA-Z0-9_]*+)\s*+=\s*+(?:"((?:[^"\\]|\\.)*+)"|([^\s"{},=\\]++))\s*+')
_SPEC = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*+)(?:\{{({_LABEL.pattern}(?:,{_LABEL.pattern})*+)\}})?")
_LABEL_NAME = re.compile("[a-zA-Z_][a-zA-Z0-9_]{0,127}")
_ENGINE_NAME = re.compile("[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The series of one family that have all of some labels."""

    family: str
    labels: tuple[tuple[str, str], ...] = ()
    value_label: str | None = None
    """The label that holds the value, for families that carry facts in labels; None = the sample's own value."""
    above_one: AboveOne = "clamp"
    """For utilisation only."""

    @classmethod
    def parse(cls, text: str, *, value_label: str | None = None, above_one: AboveOne = "clamp") -> MetricSpec:
        """`family` or `family{label=value,label2="v"}`. Raises ValueError, with a text for the settings' author."""
        match = _SPEC.fullmatch(text)
        pairs = _LABEL.findall(match[2] or "") if match else []
        if match is None or len({name for name, _, _ in pairs}) < len(pairs):
            raise ValueError("name or name{label=value,...} with each label once")
        labels = tuple((name, bare or re.sub(r"\\([\\\"])", r"\1", quoted)) for name, quoted, bare in pairs)
        return cls(match[1], labels, value_label, above_one)

    def __str__(self) -> str:
        labels = ",".join(f"{name}={value}" for name, value in self.labels)
        return f"{self.family}{{{labels}}}" if labels else self.family


@dataclass(frozen=True, slots=True)
class MetricRatio:
    """What is used of what there is."""

    used: MetricSpec
    capacity: MetricSpec


Signal: TypeAlias = tuple[MetricSpec | MetricRatio, ...]
"""Tried in order; the first that selects any series decides. Empty = the engine has no such signal: never missing."""

_WORDS = "a metric as name or name{label=value,...}"


@dataclass(frozen=True, slots=True)
class SignalForm:
    """Annotates a key that holds a `Signal`, and says in which forms it may be written."""

    share: bool = False
    """It is a utilisation: a ratio may be given, and what is above 1."""
    fact: bool = False
    """It may stand in a label."""

    @property
    def wanted(self) -> str:
        """What a user is told to write."""
        more = {(True, False): ", {metric, above_one}, {used, max}", (False, True): ", {metric, label}"}
        return f'{_WORDS}{more.get((self.share, self.fact), "")}, a list of these, or ""'

    def read(self, value: object) -> Signal:
        """The signal that `value` means; raises a ValidationError with the path of each part that is wrong."""
        if value == "":
            return ()
        entries: list[object] = value if isinstance(value, list) else [value]
        if not 1 <= len(entries) <= MAX_SPECS:
            raise expected(f"1 to {MAX_SPECS} metrics")
        wrong: list[InitErrorDetails] = []
        specs: list[MetricSpec | MetricRatio] = []
        for index, entry in enumerate(entries):
            try:
                specs.append(self._entry(entry))
            except _WrongError as error:
                at = (index,) if isinstance(value, list) else ()
                wrong += [
                    InitErrorDetails(type=expected(what), loc=at + loc, input=got) for loc, what, got in error.parts
                ]
        if wrong:
            raise ValidationError.from_exception_data("signal", wrong)
        return tuple(specs)

    def _entry(self, value: object) -> MetricSpec | MetricRatio:
        if isinstance(value, str):
            return _spec(value)
        if isinstance(value, dict):
            options: dict[str, Option] = {}
            options |= {"above_one": _above_one} if self.share else {}
            options |= {"label": _label} if self.fact else {}
            if options and "metric" in value and set(value) <= {"metric", *options}:
                spec = _spec(value["metric"], ("metric",))
                for key in options.keys() & value.keys():
                    spec = options[key](spec, value[key])
                return spec
            if self.share and set(value) == {"used", "max"}:
                return _ratio(value["used"], value["max"])
        raise _WrongError(((), self.wanted, value))

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        text: dict[str, object] = {"type": "string"}
        entries = [text]
        if self.share:
            entries += [_mapping("metric", above_one={"enum": list(get_args(AboveOne))}), _mapping("used", "max")]
        if self.fact:
            entries.append(_mapping("metric", label=text))
        return {"anyOf": [*entries, {"type": "array", "items": {"anyOf": entries}, "maxItems": MAX_SPECS}]}


Part: TypeAlias = tuple[tuple[str, ...], str, object]
"""Where in an entry, what was expected there, and what was there instead."""
Option: TypeAlias = Callable[[MetricSpec, object], MetricSpec]


class _WrongError(Exception):
    """Parts of an entry are wrong."""

    def __init__(self, *parts: Part) -> None:
        super().__init__(parts)
        self.parts = parts


def _spec(value: object, loc: tuple[str, ...] = ()) -> MetricSpec:
    if not isinstance(value, str):
        raise _WrongError((loc, _WORDS, value))
    try:
        return MetricSpec.parse(value)
    except ValueError as error:
        raise _WrongError((loc, f"a metric as {error}", value)) from None


def _ratio(used: object, capacity: object) -> MetricRatio:
    specs: list[MetricSpec] = []
    wrong: list[Part] = []
    for key, value in (("used", used), ("max", capacity)):
        try:
            specs.append(_spec(value, (key,)))
        except _WrongError as error:
            wrong += error.parts
    if wrong:
        raise _WrongError(*wrong)
    return MetricRatio(*specs)


def _above_one(spec: MetricSpec, value: object) -> MetricSpec:
    for known in get_args(AboveOne):
        if value == known:
            return replace(spec, above_one=known)
    raise _WrongError((("above_one",), "clamp, per_cent or ignore", value))


def _label(spec: MetricSpec, value: object) -> MetricSpec:
    if not isinstance(value, str) or not _LABEL_NAME.fullmatch(value):
        raise _WrongError((("label",), "the name of a label", value))
    return replace(spec, value_label=value)


def _mapping(*required: str, **optional: Mapping[str, object]) -> dict[str, object]:
    """A JSON schema; the required keys hold specs."""
    properties = {**{key: {"type": "string"} for key in required}, **optional}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


Requests: TypeAlias = Annotated[Signal, SignalForm()]
Share: TypeAlias = Annotated[Signal, SignalForm(share=True)]
Fact: TypeAlias = Annotated[Signal, SignalForm(fact=True)]
Port: TypeAlias = Annotated[int, count("1", "65535")]


class EngineSettings(Section):
    """Where an engine exports its load. null keeps the built-in value; an engine of your own has no built-in values."""

    metrics_path: ShownUrl | None = None
    """For endpoints with `metrics: auto`. null = /metrics."""
    metrics_port: Port | None = None
    """On the endpoint's host. null = the endpoint's own."""
    queued: Requests | None = None
    """Requests that wait in the engine (signal `waiting`), summed over matching series."""
    running: Requests | None = None
    """Requests that run in the engine, summed."""
    kv_utilization: Share | None = None
    """Share of the KV cache in use, 0 to 1, averaged, by blocks if known."""
    block_size_tokens: Fact | None = None
    """Tokens in a block of the cache."""
    kv_blocks: Fact | None = None
    """Blocks of the cache, summed."""
    work: Requests | None = None
    """Counters that move with each step of computation, to tell a hanging engine from a busy one. Summed."""
    lora: Requests | None = None
    """A family with the labels of `vllm:lora_requests_info`, whose value is the time."""
    load_reports: bool | None = None
    """Request load reports in response headers (ORCA). null = only from vLLM, if one process reports the complete
    load."""

    @field_validator("metrics_path", mode="after")
    @classmethod
    def _check_path(cls, value: str | None) -> str | None:
        if value is None or PATH.fullmatch(value):
            return value
        raise expected("an absolute path or null")


def check_engine_names(value: object) -> object:
    """What `engines` holds, before its engines are read; raises if a name cannot be one."""
    if isinstance(value, dict):
        if len(value) > MAX_ENGINES:
            raise expected(f"at most {MAX_ENGINES} engines")
        wrong = [
            InitErrorDetails(type=expected("another name (auto is taken)"), loc=(name,), input=name)
            for name in value
            if name == "auto" or not _ENGINE_NAME.fullmatch(str(name))
        ]
        if wrong:
            raise ValidationError.from_exception_data("engines", wrong)
    return value


def check_own_engines(engines: dict[str, EngineSettings]) -> dict[str, EngineSettings]:
    """What `engines` holds, once each is right by itself; raises if one could never show any load."""
    wrong = [
        InitErrorDetails(type=expected("at least one of queued, running and kv_utilization"), loc=(name,), input=one)
        for name, one in engines.items()
        if name not in BUILT_IN_ENGINES and not (one.queued or one.running or one.kv_utilization)
    ]
    if wrong:
        raise ValidationError.from_exception_data("engines", wrong)
    return engines
