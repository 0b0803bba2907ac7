# SPDX-License-Identifier: Apache-2.0
"""Secrets in the settings: how they are written, and that nothing that is done with them shows them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from hashlib import sha256
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from lbproxy.config.parse import parse, without_secrets
from lbproxy.config.sections.access import MAX_KEYS, MAX_SECRET_CHARS, MIN_SECRET_CHARS, Secret, read_key_file
from lbproxy.config.shown import without_parts_of, without_path, without_values
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings

KEY = "sk-0123456789-abcdefghij"
DIGEST = sha256(KEY.encode())
MINIMAL = "endpoints: [http://gpu-1:8000]\n"


def read(more: str, environ: dict[str, str] | None = None) -> Settings:
    return parse(MINIMAL + more, environ=environ or {})


def problem(more: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        read(more, environ)
    return str(error.value)


def test_no_form_of_a_setting_shows_a_secret() -> None:
    """Neither its text nor its digest: a page that shows the settings cannot get it wrong."""
    admin = f"admin: {{host: 127.0.0.1, port: 9901, token: {KEY}}}\n"
    settings = read(f"{admin}auth: {{keys: [{KEY}, {{name: b, key: {KEY}-b}}]}}\n")
    shown = [
        *(repr(settings), str(settings), f"{settings}", settings.model_dump_json(), str(settings.model_dump())),
        *(str(settings.model_dump(mode="json")), repr(settings.auth.keys[0].key), str(settings.auth.keys[0].key)),
        json.dumps(settings.model_dump(mode="json")),
    ]
    for text in shown:
        assert KEY not in text
        assert DIGEST.hexdigest() not in text
        assert DIGEST.digest().hex(" ") not in text
        assert repr(DIGEST.digest()) not in text
    assert copy.deepcopy(settings) == settings
    assert KEY.encode() not in pickle.dumps(settings)


def test_a_secret_is_text_or_its_digest() -> None:
    for value in (KEY, f"sha256:{DIGEST.hexdigest()}", f"sha256:{DIGEST.hexdigest().upper()}"):
        secret = Secret.read(value)
        assert secret.is_in(KEY.encode())
        assert not secret.is_in(KEY.upper().encode())
        assert not secret.is_in(value.encode()) or value == KEY
    assert Secret.read(KEY) == Secret.read(f"sha256:{DIGEST.hexdigest()}")


def test_keys_get_names_by_their_place() -> None:
    settings = read(f"auth: {{keys: [{KEY}, {{name: team-b, key: {KEY}-b}}, '${{K}}']}}", {"K": f"{KEY}-c"})
    assert [one.name for one in settings.auth.keys] == ["key-1", "team-b", "key-3"]


HIDDEN = "hunter2-hunter2"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (f"auth: {{keys: [{HIDDEN}]}}", "auth.keys[0].key: expected a secret: 16 to 512 visible ASCII characters"),
        (f"auth: {{keys: ['{HIDDEN} {HIDDEN}']}}", "auth.keys[0].key: expected a secret"),
        (f"auth: {{keys: [{HIDDEN}{HIDDEN}é]}}", "auth.keys[0].key: expected a secret"),
        (f"auth: {{keys: ['sha256:{HIDDEN}{HIDDEN}']}}", "auth.keys[0].key: expected a secret"),
        (f"auth: {{keys: {HIDDEN}}}", "auth.keys: expected a list"),
        (f"auth: {{keys: {{a: {HIDDEN}}}}}", "auth.keys: expected a list"),
        (f"auth: {{keys: [[{HIDDEN}]]}}", "auth.keys[0].key: expected a secret"),
        ("auth: {keys: [12345678901234567]}", "(quote it if YAML reads it as a number)"),
        ("auth: {keys: [null]}", "auth.keys[0].key: expected a secret"),
        (f"auth: {HIDDEN}", "auth: expected a mapping"),
        (f"auth: [{HIDDEN}]", "auth: expected a mapping"),
        (f"auth: {{keys: [{{name: '{HIDDEN}!', key: {KEY}}}]}}", "auth.keys[0].name: expected a name of 1 to 64"),
        (f"auth: {{keys: [{{nam: {HIDDEN}, key: {KEY}}}]}}", "auth.keys[0].nam: unknown key, did you mean name?"),
        (f"auth: {{keys: [{{name: {HIDDEN}}}]}}", "auth.keys[0].key: required, but not there"),
        (f"auth: {{keys: [{KEY}, {KEY}]}}", "auth.keys: expected each key once"),
        (f"auth: {{keys: ['{HIDDEN}${{']}}", "auth.keys[0]: expected ${NAME} or ${NAME:-default}"),
        (f"auth: {{keys: ['{HIDDEN}${{NOT_SET}}']}}", "auth.keys[0]: environment variable NOT_SET is not set"),
        (f"auth: {{file: ['{HIDDEN}']}}", "auth.file: expected text"),
        ("auth: {file: ''}", "auth.file: expected the path of a file"),
        (f"admin: {{host: 127.0.0.1, port: 1, token: {HIDDEN}}}", "admin.token: expected a secret"),
        (f"admin: {{host: 127.0.0.1, port: 1, token: {{a: {HIDDEN}}}}}", "admin.token: expected a secret"),
    ],
)
def test_what_is_refused_is_not_repeated(more: str, told: str) -> None:
    """Errors go to terminals and logs, and a typing error in a key is nearly the key."""
    text = problem(more)
    assert told in text
    assert HIDDEN not in text
    assert KEY not in text
    assert "1234567890" not in text


@pytest.mark.parametrize("length", [MIN_SECRET_CHARS - 1, MAX_SECRET_CHARS + 1])
def test_lengths_that_no_key_has(length: int) -> None:
    assert "expected a secret" in problem(f"auth: {{keys: [{'k' * length}]}}")


def test_a_file_of_keys() -> None:
    digests = f"sha256:{'0' * 64}\nx: sha256:{'1' * 64}"
    text = f"# who may\n\n  team-b: {KEY}-b  \r\nteam-b:\t{KEY}-c\n{KEY}-d\n  # more\n{digests}"
    keys = read_key_file(text, source="keys")
    assert [one.name for one in keys] == ["team-b", "team-b", "key-3", "key-4", "x"]
    assert keys[2].key.is_in(f"{KEY}-d".encode())


PASTED = [("a: sha256:", "  -"), ("sha256:", "  -"), ("a: sha256: ", ""), ("sha256: ", "")]
"""What `sha256sum` prints ends in a dash; a space after the colon would make the digest a key's text."""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"team-b:{KEY}", "line 2: expected NAME: KEY, with a space after the colon"),
        (f"team b: {KEY}", "line 2: expected NAME: KEY"),
        (f"{'n' * 65}: {KEY}", "line 2: expected NAME: KEY"),
        (f"a: {KEY} # mine", "line 2: expected NAME: KEY"),
        (f"a = {KEY}", "line 2: expected NAME: KEY"),
        ("a: short", "line 2: expected a secret"),
        (f"b: {KEY}-1", "line 2: expected each key once, but line 1 has this one too"),
        ("a: sha256:abc", "line 2: expected a secret"),
        *((f"{one}{'0' * 64}{end}", "line 2: expected sha256: and 64 hex digits") for one, end in PASTED),
        (f"a: {KEY}\x00", "line 2: expected a secret"),
    ],
)
def test_a_line_that_is_no_key_is_named_by_its_number_alone(line: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_key_file(f"a: {KEY}-1\n{line}\n", source="keys")
    assert told in str(error.value)
    assert KEY not in str(error.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", " \n"])
def test_a_file_without_a_key_is_an_error(text: str) -> None:
    """It would lock everybody out, or let everybody in."""
    with pytest.raises(ConfigError, match="the file has no key"):
        read_key_file(text, source="keys")


def test_a_file_of_too_many_keys_is_an_error() -> None:
    lines = (f"{n:020}" for n in range(MAX_KEYS + 1))
    with pytest.raises(ConfigError, match="at most 10000 keys"):
        read_key_file("\n".join(lines), source="keys")


# --- URLs and variables: everywhere, right or wrong ------------------------------------------------------------------

SECRET = "hunter2hunter2hunter2"
ENVIRON = {"SECRET": SECRET, "HOST": "h"}
FORMS_OF_A_SECRET = (
    *("http://user:{}@h:1/x", "http://user:{}@h", "http://h:1/x?api-key={}", "http://h:1/x#{}", "//{}@h"),
    "http://u:{}",
    *("redis://:{}@h:1:2", "redis:{}@h", "redis://u:{}/x y@h", "redis://h/0?password={}&x=y", "tcp://{}@h:1"),
    *("h:{}@h", "/x?token={}", ":1/x?token={}", "file:x?{}", "dns+http://{}@h:1", "http://h:1/?{}@h"),
)
FORMS_OF_A_VARIABLE = (
    *("${{SECRET}}", "x${{SECRET}} y", "http://${{HOST}}:x/${{SECRET}}", "{}${{UNSET}}", "{}${{"),
    "http://u:{}@${{UNSET}}:1",
    *("${{UNSET:-{} ü}}", "${{A:-{}${{B}}}}"),
)


def texts_in(section: type[BaseModel], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all settings, numbers and words included. `*`: any name; `0`: an item."""
    for key, facts in section.model_fields.items():
        yield from _texts_of(facts.annotation, (*at, key))


def _texts_of(annotation: object, at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield at
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from texts_in(annotation, at)
    for one in get_args(annotation):
        inner = (*at, "*") if origin is dict else (*at, "0") if origin in {tuple, list} else at
        is_section = isinstance(one, type) and (issubclass(one, BaseModel) or origin in {dict, tuple, list})
        if is_section or get_origin(one) is not None:
            yield from _texts_of(one, inner)


PATHS = sorted({path for path in texts_in(Settings) if len(path) < 8})


def written(path: tuple[str, ...], text: str) -> str:
    """A settings file with this text there."""
    value: object = text
    for key in reversed(path):
        value = [value] if key == "0" else {"name" if key == "*" else key: value}
    assert isinstance(value, dict)
    endpoints = value.get("endpoints")
    if path[:2] == ("endpoints", "0") and isinstance(endpoints, list) and isinstance(endpoints[0], dict):
        endpoints[0].setdefault("url", "http://gpu-1:8000")
    return json.dumps({"endpoints": ["http://gpu-1:8000"], **value})


def test_the_walk_finds_the_settings_that_matter() -> None:
    found = {".".join(path) for path in PATHS}
    assert len(found) > 150
    assert found >= {
        *("replicas.url", "endpoints.0.url", "endpoints.0.metrics", "endpoints.0.proxy", "endpoints.0.cold_start.url"),
        *("traces.endpoint", "traces.headers.*", "listen", "admin.token", "cors.origins.0", "routing.policy"),
    }


@pytest.mark.parametrize("form", [*FORMS_OF_A_SECRET, *FORMS_OF_A_VARIABLE])
def test_no_value_of_a_url_or_of_a_variable_is_ever_told(form: str) -> None:
    """At every path, whatever it is for: what is refused is not repeated, and what is accepted is not shown."""
    refused = 0
    for path in PATHS:
        told = _told(written(path, form.format(SECRET)))
        refused += told.startswith("settings: ")
        if told.startswith("settings: ") or (form in FORMS_OF_A_SECRET and not _is_a_name(path)):
            assert SECRET not in told, (path, form)
    assert refused > len(PATHS) / 2


def _told(text: str) -> str:
    """What is refused, or what is shown of what is not."""
    try:
        return json.dumps(without_secrets(parse(text, environ=ENVIRON)))
    except ConfigError as error:
        return str(error)


def _is_a_name(path: tuple[str, ...]) -> bool:
    """What may be any text, and is no URL: names of models, services and files, Unix sockets among them."""
    names = {"file", "service_name", "ca", "cert", "key", "unix", "*"}
    return path[-1] in names or not {"models", "model", "keep_loaded", "never_load"}.isdisjoint(path)


def test_a_file_that_is_no_settings_file_is_not_repeated() -> None:
    """Of keys, or of a shell's variables."""
    keys = (SECRET, f"key:{SECRET}", f"- {SECRET}", f"'{SECRET}/+': x")
    for text in (*keys, f"PASSWORD={SECRET}", f"a: b: {SECRET}", f"&{SECRET} x"):
        with pytest.raises(ConfigError) as error:
            parse(text, environ={})
        assert SECRET not in str(error.value), text


def test_what_is_shown_of_a_url() -> None:
    shown = {
        "http://gpu-1:8000/v1": "http://gpu-1:8000/v1",
        "http://user:pw@h:1/p?q#f": "http://***@h:1/p?***",
        "user:p@w@h": "***@h",
        "redis://u:pw": "redis://u:***",
        "/metrics?token=x": "/metrics?***",
        "unix:/run/x": "unix:/run/x",
        "[::1]:80": "[::1]:80",
        "http://[::1]:80/x": "http://[::1]:80/x",
    }
    assert {url: without_values(url) for url in shown} == shown
    assert without_path("https://hooks.example/services/T0/B0/x") == "https://hooks.example/***"
    said = without_parts_of("invalid password hunter2 of u at h:1", "redis://u:hunter2@h:1/0?db=hunter3")
    assert said == "invalid password *** of u at h:1"
