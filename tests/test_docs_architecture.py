# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md names every package, with what its `__init__` says of it; what its tables name is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from keyword import iskeyword
from pathlib import Path

import pytest

from lbproxy.core.requests.request import InferenceRequest
from tests.support.docs import DOCS, ROOT, cells, expect_generated
from tests.support.pool import MODEL, pool_of
from tests.test_architecture import PACKAGES

PACKAGE = ROOT / "lbproxy"
LAYERS = (
    *("config", "core", "driver", "workers", "net", "proxy", "control", "extras"),
    *("processes", "sim", "demo", "commands"),
)


def about(folder: Path) -> str:
    """The first sentence of what it says of itself, up to its list of examples."""
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    sentence = said.partition("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".")
    head = sentence.partition(": ")[0]
    return head if len(head.split()) > 3 else sentence


def folders() -> list[Path]:
    """Layers, each followed by its folders in the order in which they may import each other."""
    found = []
    for layer in LAYERS:
        found.append(PACKAGE / layer)
        order = PACKAGES.get(layer, "").split()
        inside = {one.parent.relative_to(PACKAGE / layer) for one in (PACKAGE / layer).glob("*/**/__init__.py")}
        ranks = {one: order.index(one.parts[0]) if one.parts[0] in order else len(order) for one in inside}
        found += [PACKAGE / layer / one for one in sorted(inside, key=lambda one: (ranks[one], one))]
    return found


def test_every_package_is_on_the_page() -> None:
    lines = []
    for folder in folders():
        name = folder.relative_to(PACKAGE).as_posix()
        lines.append(f"- {f'**{name}/**' if '/' not in name else f'{name}/'}: {about(folder)}\n")
    expect_generated(DOCS / "architecture.md", "packages", "".join(lines))


def defined(file: Path) -> set[str]:
    """The names that a module defines, at any depth: `name`, and `Class.name` for what is in a class."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        found |= _own_names(node)
        if isinstance(node, ast.ClassDef):
            inside = {name for one in ast.walk(node) if one is not node for name in _own_names(one)}
            found |= {f"{node.name}.{name}" for name in inside}
    return found


def _own_names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {one.id for one in targets if isinstance(one, ast.Name)}
    of_self = {one.attr for one in targets if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self"}
    return names | of_self


@cache
def everything_defined() -> set[str]:
    """By any module of lbproxy, or by setup.py."""
    return {name for file in [*PACKAGE.rglob("*.py"), ROOT / "setup.py"] for name in defined(file)}


def file_at(path: str, before: Path | None) -> Path:
    """The file that a table names. Without a folder it is beside the one before it, or the only one of its name."""
    if (ROOT / path).exists():  # setup.py, tests/
        return ROOT / path
    beside = before.parent / path if before is not None and "/" not in path else PACKAGE / path
    return beside if beside.exists() else next(iter(PACKAGE.rglob(path)), beside)


def files_in(text: str) -> list[Path]:
    """The files that a cell names, in order."""
    files: list[Path] = []
    for path in re.findall(r"[\w/]+\.py", text):
        files.append(file_at(path, files[-1] if files else None))
    return files


def names_in(text: str) -> list[str]:
    """What a cell names of Python: `name` or `Class.name`."""
    words = re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)?)`", text)
    return [word for word in words if not word.endswith(".py") and not iskeyword(word)]


def section_rows(heading: str) -> list[list[str]]:
    """The rows of the table of one section of the page."""
    text = (DOCS / "architecture.md").read_text()
    return cells(text.split(f"\n## {heading}\n")[1].partition("\n## ")[0])


def claims(heading: str) -> Iterator[tuple[str, list[Path]]]:
    """The names in a section's table, each with the files of which one must define it; none: any module."""
    for row in section_rows(heading):
        has_files = len(row) == 4  # the life of a request: number, functions, files, text
        if has_files:
            yield from ((name, files_in(row[2])) for name in names_in(row[1]))
        for cell in row[3:] if has_files else row:
            yield from ((name, []) for name in names_in(cell))
            for names, path in re.findall(r"((?:`[\w.]+`(?: and )?)+) (?:in|of) (`?[\w/]+\.py)", cell):
                yield from ((name, files_in(path)) for name in names_in(names))


@pytest.mark.parametrize("heading", ["The life of a request", "Where do I change ...?", "State: one owner each"])
def test_every_name_in_a_table_is_in_the_file_beside_it(heading: str) -> None:
    """A reader looks for it there. What stands alone is anywhere in the package."""
    found = list(claims(heading))
    assert len(found) > 15
    for name, files in found:
        missing = [file for file in files if not file.exists()]
        assert not missing, name
        known = {one for file in files for one in defined(file)} or everything_defined()
        assert name in known, f"{name} is not in {[file.name for file in files] or 'lbproxy'}"


def test_every_file_in_the_tables_exists() -> None:
    for heading in ("The life of a request", "Where do I change ...?", "State: one owner each"):
        for row in section_rows(heading):
            assert all(file.exists() for cell in row for file in files_in(cell)), row


def test_the_terms_of_the_price_are_those_of_explain_with_what_learns_them() -> None:
    """docs/routing.md, the list of the terms in the code."""
    text = (DOCS / "routing.md").read_text().split("\n### Terms in the code\n")[1].partition("\n### ")[0]
    terms = re.findall(r"^- `(\w+)`: ((?:.+\n)(?:  .+\n)*)", text, re.MULTILINE)
    assert [name for name, _ in terms] == [*terms_of_explain(), "adapter"]
    for _, what in terms:
        pairs = re.findall(r"((?:`[\w.]+`,\s)*`[\w.]+`)\sin\s`([\w/]+\.py)`", what)
        learned = [(one, defined(PACKAGE / "core" / path)) for names, path in pairs for one in names_in(names)]
        assert all(name in found for name, found in learned), what
        assert all(name in everything_defined() for name in names_in(what)), what


def terms_of_explain() -> list[str]:
    """The names of the parts of a cost, in their order, for a model that is no adapter."""
    balancer, _ = pool_of(2, policy="adaptive")
    balancer.explain(True)
    decision = balancer.submit(InferenceRequest("r", MODEL, True, 400, 400), now=0.0).decision
    assert decision is not None
    return [*decision.breakdown()[0]]
