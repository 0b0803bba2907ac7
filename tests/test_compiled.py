# SPDX-License-Identifier: Apache-2.0
"""The wheel: what of it is compiled, and what code must not do for that (docs/decisions/0027)."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lbproxy import __version__

ROOT = Path(__file__).parent.parent
BUILT = ROOT / "build/compiled"
BASES = {"ABC", "Protocol", "NamedTuple", "Enum", "Exception", "Generic"}
"""What a compiled class may inherit from besides compiled classes: others crash, or are slow."""


def listed() -> list[Path]:
    """The modules that setup.py compiles."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "COMPILED"
    )
    folders = eval(compile(ast.Expression(value), "setup.py", "eval"), {})
    return [ROOT / folder / f"{name}.py" for folder, names in folders.items() for name in names.split()]


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in listed():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield path, node


def test_what_is_compiled_is_there() -> None:
    assert len(listed()) > 30
    for path in listed():
        assert path.is_file(), path


def test_compiled_classes_inherit_from_compiled_classes_alone() -> None:
    """mypyc lays out an instance by itself: one of a class with a base of the standard library was freed while weak
    references to it lived, which crashed.
    """
    own = {node.name for _, node in classes()}
    for path, node in classes():
        bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
        assert bases <= BASES | own, f"{path.name}: {node.name}"


def test_compiled_dataclasses_have_no_slots() -> None:
    """`slots=True` makes a second class, whose layout mypyc does not know. Compiled classes have slots anyway."""
    for path, node in classes():
        assert not any("slots" in ast.unparse(one) for one in node.decorator_list), f"{path.name}: {node.name}"


def test_compiled_objects_are_known_to_the_garbage_collector() -> None:
    """mypyc frees an `acyclic` object as one with the collector's header, and so writes over what is not its own."""
    for path, node in classes():
        assert not any("acyclic" in ast.unparse(one) for one in node.decorator_list), f"{path.name}: {node.name}"


PURE = {"len", "min", "max", "int", "start", "end"}
"""Functions, and methods of a match, that may be called twice."""


def test_no_slice_has_a_call_with_effects_in_its_bounds() -> None:
    """mypyc works out the bounds twice where it does not know what is sliced: each log line was written twice."""
    for path in listed():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Slice):
                calls = {
                    ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(node) if isinstance(call, ast.Call)
                }
                assert calls <= PURE, f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_constant_is_a_final_tuple() -> None:
    """mypyc says of one with floats that it is not set, when it is read."""
    for path in listed():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Final"):
                assert not isinstance(node.value, ast.Tuple), f"{path.name}: {ast.unparse(node.target)}"


def test_what_the_build_asks_for_is_what_lbproxy_asks_for() -> None:
    """mypy judges the source by the types of what it imports: of the releases that it runs on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = set(project["project"]["dependencies"]) | set(project["dependency-groups"]["build"])
    others = {re.split("[=<>~]", one)[0] for one in project["build-system"]["requires"] if one not in asked}
    assert others == {"mypy", "types-PyYAML"}


def test_where_there_is_a_compiler_the_wheel_is_compiled() -> None:
    """As `make compiled` built it."""
    if not (BUILT / ".made").exists():
        pytest.skip("make compiled was not run")
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    done = subprocess.run(
        [sys.executable, "-m", "lbproxy", "--version"], cwd=BUILT, capture_output=True, text=True, check=True
    )
    kind = "compiled" if shutil.which(compiler) is not None and headers.exists() else "pure Python"
    assert done.stdout == f"lbproxy {__version__} ({kind})\n"
