"""The house's rules, checked: who may import whom, what core may not touch, how large a thing may grow.

docs/architecture.md says them in words; this file is what keeps them true.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "lbproxy"
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = [
    *("config", "core", "pulse process", "runtime", "net", "proxy control extras", "app"),
    *("check demo sim_cli terminal", "cli", "__main__"),
]
"""Left to right: a module imports its own layer and what stands left of it; neighbours in one place not each other."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}

IMPURE = {
    "asyncio",
    "aiohttp",
    "httpx",
    "time",
    "os",
    "socket",
    "threading",
    "logging",
    "prometheus_client",
    "uvloop",
    "subprocess",
    "select",
    "ssl",
}
ONLY_IN = {
    "prometheus_client": {"control/telemetry.py", "control/families.py", "control/endpoint_families.py"},
    "yaml": {"config/"},
    "pydantic": {"config/"},
    "pydantic_core": {"config/"},
    "uvloop": {"cli.py"},
    "rich": {"check.py", "sim_cli.py", "cli.py", "terminal/", "demo/show.py"},
    "httpx": {"terminal/"},
    "matplotlib": {"sim/plots.py"},
    "dns": {"control/nameservers.py"},
    "opentelemetry": {"extras/spans.py", "extras/traces.py"},
}
READS_FILES = {
    *("app.py", "cli.py", "control/credentials.py", "control/dashboard/__init__.py", "control/discovery.py"),
    "control/memory.py",
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70


def place(file: Path) -> str:
    """The file's path inside the package."""
    return file.relative_to(ROOT).as_posix()


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def imports(file: Path) -> Iterator[str]:
    """The dotted names of everything that a file imports, wherever in it."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(file)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(dotted: str) -> str | None:
    """The layer that a dotted lbproxy name belongs to; None for the package itself (its version)."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "lbproxy" and len(parts) > 1 and parts[1] != "__version__" else None


def is_pure(file: Path) -> bool:
    return place(file).startswith(("core/", "sim/")) and place(file) not in {"sim/http.py", "sim/sabotage.py"}


def each(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("file", files, ids=place)


@each(FILES)
def test_imports_point_left(file: Path) -> None:
    mine = place(file).split("/")[0].removesuffix(".py")
    if mine in {"__init__", "sim"}:
        return
    for name in imports(file):
        other = room(name)
        if other is None or other == mine:
            continue
        if other == "sim":
            assert RANK[mine] >= RANK["demo"], f"{name}: only the command line's layer may use the simulation"
        else:
            assert RANK[other] < RANK[mine], f"{name} stands right of {mine}, or beside it"


@each([file for file in FILES if place(file).startswith("sim/")])
def test_the_simulation_stands_on_core_alone(file: Path) -> None:
    for name in imports(file):
        assert room(name) in {None, "core", "sim"}, name


@each([file for file in FILES if is_pure(file)])
def test_pure_modules_touch_nothing(file: Path) -> None:
    for name in imports(file):
        assert name.split(".")[0] not in IMPURE, name
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id not in {"time", "os"}, ast.unparse(node)
            if node.value.id == "random":
                assert node.attr == "Random", f"{ast.unparse(node)}: chance is passed in"


@each(FILES)
def test_libraries_stay_in_their_place(file: Path) -> None:
    for name in imports(file):
        allowed = ONLY_IN.get(name.split(".")[0])
        assert allowed is None or any(place(file).startswith(prefix) for prefix in allowed), name


@each(FILES)
def test_files_are_read_in_few_places(file: Path) -> None:
    calls = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    methods = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
    functions = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    if place(file) not in READS_FILES:
        assert "open" not in functions
        assert not methods & {"open", "read_text", "read_bytes", "fdopen"}


OWN_TASKS = {"net/pool.py", "net/listener.py", "net/names.py", "sim/sabotage.py"}
"""These own what they start, and end it: dialling, accepting (docs/decisions/0009) and resolving, a simulated server's
faults."""


@each([file for file in FILES if place(file) not in OWN_TASKS])
def test_tasks_live_in_task_groups(file: Path) -> None:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Attribute) and node.attr in {"create_task", "ensure_future"}:
            assert ast.unparse(node.value) not in {"asyncio", "loop", "self.loop", "self._loop"}, ast.unparse(node)


@each(FILES)
def test_nothing_grows_too_large(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@each(FILES)
def test_every_module_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(tree(file))


def test_the_rules_can_fail() -> None:
    """The checks above are worth nothing if they see nothing."""
    assert len(FILES) > 15
    assert any(is_pure(file) for file in FILES)
    assert "orjson" in {name.split(".")[0] for name in imports(ROOT / "core" / "requests" / "openai.py")}
