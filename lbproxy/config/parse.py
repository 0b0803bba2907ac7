# SPDX-License-Identifier: Apache-2.0
"""Settings: `parse` turns the text of a settings file into a frozen `Settings`, or says everything that is wrong.

It reads no file, no environment but the mapping it is given, no clock and no network. This module joins the others of
`config` (its `__init__` says what each is for) and words the report: all problems at once, each with its path, and
nothing that may be secret (`shown`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from lbproxy.config.scenario import Scenario
from lbproxy.config.sections.endpoints import (
    FOLDER,
    OWN_ENGINES,
    EndpointSettings,
)
from lbproxy.config.shown import without_values
from lbproxy.config.text import ConfigError, Read, is_secret, join, one_line, read_text
from lbproxy.config.tree import MAX_ENDPOINTS, OWN_ADDRESSES, EndpointList, Settings
from lbproxy.config.values import duration

Root = TypeVar("Root", bound=BaseModel)
MAX_MEANT = 3
"""Places that a key which is unknown where it stands may be meant for."""


def parse(text: str, *, environ: Mapping[str, str], source: str = "settings", folder: str = "") -> Settings:
    """The settings that a file's text says.

    `environ` is what `${NAME}` and `${NAME:-default}` are looked up in; as in a shell, the default also stands in for
    an empty variable. `source` names the text in the error; relative paths in it begin at `folder`. Raises
    `ConfigError` and nothing else, whatever the text.
    """
    return _read_as(Settings, text, environ, source, folder)


def parse_endpoints(
    text: str, *, environ: Mapping[str, str], source: str, folder: str, settings: Settings
) -> tuple[EndpointSettings, ...]:
    """The endpoints that a file lists which `settings` name. Raises `ConfigError` and nothing else, as `parse` does."""
    own = {key: getattr(settings, key) for key in ("listen", "admin") if getattr(settings, key) is not None}
    context = {OWN_ENGINES: list(settings.engines), OWN_ADDRESSES: own, FOLDER: folder}
    return _validated(EndpointList, read_text(text, environ=environ, source=source), context, source).root


def parse_scenario(text: str, *, environ: Mapping[str, str], source: str = "scenario") -> Scenario:
    """The same for what `lbproxy sim` simulates."""
    return _read_as(Scenario, text, environ, source)


def _read_as(root: type[Root], text: str, environ: Mapping[str, str], source: str, folder: str = "") -> Root:
    read = read_text(text, environ=environ, source=source)
    context = {OWN_ENGINES: _own_engines(read.values), FOLDER: folder}
    return _validated(root, read, context, source)


def with_endpoints(settings: Settings, endpoints: Sequence[object], *, source: str) -> Settings:
    """`settings` with these endpoints instead, each an entry of it or what a file would say. Raises ConfigError."""
    values = dict(settings) | {"endpoints": list(endpoints)}
    return _validated(Settings, Read(values, {}, frozenset()), {OWN_ENGINES: list(settings.engines)}, source)


def with_endpoint(settings: Settings, entry: Mapping[str, object], *, source: str) -> Settings:
    """`settings` with one more endpoint, as a file would say it. Raises ConfigError, as if all were read. About 0.1 µs
    for each of the others.
    """
    others = settings.endpoints
    try:
        (one,) = with_endpoints(settings, [entry], source=source).endpoints
    except ConfigError:
        one = None  # and if something else is wrong too, that is to be told as well
    if (
        one is None
        or one.kv_events
        or len(others) >= MAX_ENDPOINTS
        or any(one.name == other.name or one.identity == other.identity for other in others)
    ):
        return with_endpoints(settings, [*others, entry], source=source)
    return settings.model_copy(update={"endpoints": (*others, one)})


def name_of_entry(settings: Settings, entry: Mapping[str, object]) -> str | None:
    """The name that an endpoint would have beside those of `settings`; None if the entry is not valid."""
    context = {OWN_ENGINES: list(settings.engines)}
    try:
        return EndpointSettings.model_validate(dict(entry), context=context).name
    except ValidationError:
        return None


TTL = duration("1s", "24h")
"""How long an endpoint that registers itself stays without being renewed."""


def read_ttl(value: object) -> float:
    """Seconds. Raises ConfigError."""
    try:
        return float(TTL.read(value))
    except PydanticCustomError as error:
        raise ConfigError("the endpoint", [f"ttl: {error.message()}, got {_shown(value)}"]) from None


def _validated(root: type[Root], read: Read, context: Mapping[str, object], source: str) -> Root:
    """The tree of what was read. Raises ConfigError with all problems there are."""
    tree, problems = None, read.problems
    values = {} if read.values is None and root is not EndpointList else read.values
    try:
        tree = root.model_validate(values, context=dict(context))
    except ValidationError as error:
        unread = frozenset(problems)
        for details in error.errors(include_url=False):
            loc = details["loc"]
            # What could not be read is told once, and not again for what its absence means.
            paths = [_path(loc[:end]) for end in range(1, len(loc) + 1)]
            if unread.isdisjoint(paths):
                wrong = _wrong(details, root, is_expanded=not read.expanded.isdisjoint(paths))
                problems.setdefault(_path(loc) or "the text", wrong)
    if tree is None or problems:
        raise ConfigError(source, [f"{path}: {wrong}" for path, wrong in problems.items()])
    return tree


def without_secrets(settings: Settings) -> dict[str, object]:
    """Everything as JSON can say it, with `***` for what is secret. Durations are seconds, sizes bytes.

    What is secret is so by its type, which never shows more than stars, and not by its name: `kv_cache_tokens` is none.
    """
    return {key: _with_three_stars(value) for key, value in settings.model_dump(mode="json", by_alias=True).items()}


def _with_three_stars(value: object) -> object:
    if isinstance(value, dict):
        return {name: _with_three_stars(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_three_stars(one) for one in value]
    return "***" if value == _HIDDEN_BY_PYDANTIC else value


_HIDDEN_BY_PYDANTIC = str(SecretStr("hidden"))


def json_schema() -> dict[str, object]:
    """The JSON schema of a settings file, for editors. Laxer than `parse`: it knows no checks between keys."""
    from lbproxy.config.descriptions import DescribedSchema  # noqa: PLC0415 - reads sources, which no start needs

    return Settings.model_json_schema(schema_generator=DescribedSchema)


def endpoint_schema(ref_template: str) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """The JSON schema of each key of an endpoint that is said as a mapping, and what these refer to, by name.

    `ref_template`: how it does that, with `{model}` for the name.
    """
    from lbproxy.config.descriptions import DescribedSchema  # noqa: PLC0415 - as above

    made = EndpointSettings.model_json_schema(ref_template=ref_template, schema_generator=DescribedSchema)
    (mapping,) = (one for one in made["anyOf"] if one["type"] == "object")
    return mapping["properties"], made["$defs"]


def _own_engines(values: object) -> list[str]:
    engines = values.get("engines") if isinstance(values, dict) else None
    return list(engines) if isinstance(engines, dict) else []


_WORDING = {
    "model_type": "expected a mapping",
    "dict_type": "expected a mapping",
    "tuple_type": "expected a list",
    "string_type": "expected text (quote it if YAML reads it as something else)",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
}
"""Pydantic speaks of Python; a settings file has mappings, lists and text."""


def _wrong(details: ErrorDetails, root: type[BaseModel], *, is_expanded: bool) -> str:
    kind = details["type"]
    if kind == "missing":
        return "required, but not there"
    if kind == "extra_forbidden":
        return _unknown_key(details["loc"], root)
    worded = _WORDING.get(kind, details["msg"].replace("Input should be ", "expected "))
    if is_secret(_path(details["loc"])):
        return worded
    if isinstance(details["input"], str) and (is_expanded or not details["loc"]):
        return f"{worded}, got another text"  # of a variable, or of a file that is no settings file: of keys, perhaps
    return f"{worded}, got {_shown(details['input'])}"


def _unknown_key(loc: tuple[int | str, ...], section: type[BaseModel]) -> str:
    section = root = EndpointSettings if section is EndpointList else section
    keys = iter(loc[:-1])
    for key in keys:
        if isinstance(key, str):
            annotation = _keys(section)[key].annotation
            if get_origin(annotation) is dict:
                next(keys)  # a name that the user chose
            section = next(_sections(annotation))
    known = list(_keys(section))
    elsewhere = sorted(_elsewhere(str(loc[-1]), root), key=lambda path: not path.startswith(f"{loc[0]}."))
    meant = [*difflib.get_close_matches(str(loc[-1]), known, n=1), *elsewhere][:MAX_MEANT]
    return (
        f"unknown key, did you mean {' or '.join(meant)}?" if meant else f"unknown key, known here: {', '.join(known)}"
    )


def _elsewhere(key: str, section: type[BaseModel], path: str = "") -> Iterator[str]:
    """The places in a section that have this key, in the order of the settings."""
    keys = _keys(section)
    if key in keys:
        yield f"{path}{key}" if path else f"{key} at the top level"
    for name, field in keys.items():
        for inner in _sections(field.annotation):
            origin = get_origin(field.annotation)
            mark = "[]" if origin is tuple else ".NAME" if origin is dict else ""
            yield from _elsewhere(key, inner, f"{path}{name}{mark}.")


def _keys(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Its fields by their names in a settings file."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections that an annotation such as `tuple[EndpointSettings, ...]` or `Address | None` speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for key in loc:
        if key != "[key]":  # pydantic's mark for "the key itself is wrong"
            path = join(path, key)
    return path


def _shown(value: object) -> str:
    """A refused value, as a user would recognise it, in one short line and without what may be secret in a URL."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict | BaseModel):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return one_line(ascii(without_values(value)) if isinstance(value, str) else ascii(value))
