# SPDX-License-Identifier: Apache-2.0
"""From the text of a settings file to plain values: the part of YAML that settings need, with `${ENV}` expanded.

Responsible for everything that is wrong with the text as text; which keys exist and what they may hold is `tree`'s.

The text is untrusted. Its size, depth and number of values are bounded; anchors, aliases, tags, several documents,
duplicate keys and keys that are not plain words are refused. Scalars are read as YAML 1.2 reads them (`010` is ten,
`1:30` and `2024-01-01` are text), except that `yes/no/on/off` are also booleans. `${ENV}` is expanded after YAML was
parsed: a variable's value is always text, never YAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import yaml

MAX_TEXT_CHARS = 1 << 20
"""1 MiB: the largest useful file (1,024 endpoints with every key) has about a fifth of that."""
MAX_DEPTH = 16
"""Levels of nesting; the tree has four. PyYAML composes recursively, so this also guards the stack."""
MAX_VALUES = 20_000
"""Keys and values; 1,024 endpoints with every key have 11,265. PyYAML takes about 0.1 ms for each."""
MAX_STRING_CHARS = 4096
"""One string, before and after expansion: `${ENV}` cannot be used to fill the memory."""
MAX_PROBLEMS_SHOWN = 100

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


class ConfigError(ValueError):
    """The settings cannot be used. `str()` is a line of summary and below it the problems, one a line."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        """Each as `path: what is wrong, got ...`. All of them; `str()` shows the first 100."""
        shown = problems[:MAX_PROBLEMS_SHOWN]
        if len(problems) > len(shown):
            shown = [*shown, f"... and {len(problems) - len(shown)} more"]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {line}" for line in shown)]))


class Read(NamedTuple):
    """A text that was read."""

    values: object
    problems: dict[str, str]
    """By path what is wrong with some values, which are left out."""
    expanded: frozenset[str]
    """Paths of values with something of the environment in them: errors do not repeat these."""


def read_text(text: str, *, environ: Mapping[str, str], source: str) -> Read:
    """The values of a text.

    Raises ConfigError if the text as a whole cannot be read.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise ConfigError(source, [f"the text: expected at most 1 MiB, got {len(text)} characters"])
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the text"
        raise ConfigError(source, [f"{where}: {one_line(error.problem or error.context or 'not YAML')}"]) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # Not only YAMLError: PyYAML lets chr() fail on the escape "\UFFFFFFFF" and int() on a version of 5,000 digits.
        raise ConfigError(source, [f"the text: not YAML, {one_line(str(error))}"]) from None
    reader = _NodeReader(environ)
    return Read(None if node is None else reader.plain(node, ""), reader.problems, frozenset(reader.expanded))


def join(path: str, key: str | int) -> str:
    """The path of a key or item of what stands at `path`: `endpoints[0].url`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if not _PLAIN_KEY.fullmatch(key):
        return f"{path}[{one_line(ascii(key))}]"
    return f"{path}.{key}" if path else key


_SECRET_PATH = re.compile(
    r"(?:.*\.)?(?:auth|token|api_key|headers|proxy)(?:[.\[].*)?|replicas(?:\.url(?:[.\[].*)?)?|.*\.cold_start(?:\.url)?"
)


def is_secret(path: str) -> bool:
    """Whether what stands there may be a secret, or is one in the wrong place: errors do not repeat it."""
    return _SECRET_PATH.fullmatch(path) is not None


def one_line(text: str, limit: int = 80) -> str:
    """A short line of printable characters: what is refused still reaches a terminal or a log."""
    line = "".join(char if char.isprintable() else " " for char in text[: limit + 1])
    return line if len(line) <= limit else line[:limit] + "..."


_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MODEL_NAME = re.compile(r"[!-~][ -~]{0,255}")
_MODELS = re.compile(r"models(?:[.\[].*\.split)?|.*\]\.model_memory")
"""Paths of mappings whose keys are names of models: `Qwen/Qwen3-8B`."""
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^${}]*))?\}")
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:[eE][-+]?[0-9]{1,3})?")
_WORDS: Mapping[str, bool | None] = {
    **dict.fromkeys(("", "~", "null"), None),
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}


class _Loader(yaml.SafeLoader):
    """Composes nodes within the bounds; no constructor ever runs."""

    depth = 0
    values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        refused = None
        if getattr(event, "anchor", None) is not None:  # an alias carries the name too
            refused = "anchors and aliases are not accepted"
        elif getattr(event, "tag", None) is not None:
            refused = "tags are not accepted"
        elif self.depth == MAX_DEPTH:
            refused = f"more than {MAX_DEPTH} levels"
        elif self.values == MAX_VALUES:
            refused = f"more than {MAX_VALUES} values"
        if refused:
            raise yaml.MarkedYAMLError(problem=refused, problem_mark=event.start_mark)  # type: ignore[arg-type]
        self.depth += 1
        self.values += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _NodeReader:
    """Turns nodes into plain values; what is wrong goes to `problems`, by path."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: dict[str, str] = {}
        self.expanded: set[str] = set()

    def plain(self, node: yaml.Node, path: str) -> Plain:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, join(path, index)) for index, item in enumerate(node.value)]
        text: str = node.value
        if getattr(node, "style", None) is None:  # neither quoted nor a block
            if text.lower() in _WORDS:
                return _WORDS[text.lower()]
            if _INTEGER.fullmatch(text):
                return int(text)
            if _FLOAT.fullmatch(text):
                return float(text)
        return self._expand(text, path)

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Plain]:
        mapping: dict[str, Plain] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            words = _MODEL_NAME if _MODELS.fullmatch(path) else _PLAIN_KEY
            if not isinstance(key_node, yaml.ScalarNode) or not words.fullmatch(key_node.value):
                got = "" if isinstance(key_node, yaml.ScalarNode) else ", got a collection"
                self.problems[f"{path}, line {line}" if path else f"line {line}"] = (
                    f"expected a plain word as the key{got}"
                )
                continue
            key = key_node.value
            if key in mapping:
                self.problems[join(path, key)] = f"expected once, got it on lines {lines[key]} and {line}"
                continue
            lines[key] = line
            mapping[key] = self.plain(value_node, join(path, key))
        return mapping

    def _expand(self, text: str, path: str) -> str:
        missing: list[str] = []

        def value(match: re.Match[str]) -> str:
            found = self._environ.get(match[1])
            if match[2] is not None:
                return found or match[2]
            if found is None:
                missing.append(match[1])
            return found or ""

        wrong = None
        expanded = text
        if len(text) <= MAX_STRING_CHARS:
            expanded = _REFERENCE.sub(value, text)
        if expanded != text:
            self.expanded.add(path)
        # What else is in the text is not repeated: it may be a password beside a variable for the host.
        if "${" in _REFERENCE.sub("", text):
            wrong = "expected ${NAME} or ${NAME:-default}"
        elif missing:
            got = f", got {text!a}" if text == f"${{{missing[0]}}}" else ""
            wrong = f"environment variable {one_line(missing[0])} is not set{got}"
        elif len(expanded) > MAX_STRING_CHARS:
            wrong = f"expected at most {MAX_STRING_CHARS} characters, got {len(expanded)}"
        elif not _is_unicode(expanded):
            wrong = "expected valid Unicode"
        if wrong is None:
            return expanded
        self.problems[path or "the text"] = wrong
        return ""


def _is_unicode(text: str) -> bool:
    """False for lone surrogates: the escape "\\ud800", or undecodable bytes in the environment."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
