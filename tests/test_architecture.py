# SPDX-License-Identifier: Apache-2.0
"""The house's rules, checked: who may import whom, what core may not touch, how large a thing may grow.

docs/architecture.md says them in words; this file is what keeps them true.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.docs import WRITE

ROOT = Path(__file__).parent.parent / "lbproxy"
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = [
    *("config", "core", "driver", "workers net", "proxy control extras", "processes", "demo", "commands", "__main__"),
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
    "prometheus_client": {
        "control/telemetry/telemetry.py",
        "control/families/common.py",
        "control/families/endpoints.py",
        "control/families/features.py",
        "control/families/requests.py",
        "control/families/placements.py",
    },
    "yaml": {"config/"},
    "pydantic": {"config/"},
    "pydantic_core": {"config/"},
    "uvloop": {"processes/process.py"},
    "rich": {"commands/", "demo/show.py"},
    "httpx": {"commands/client.py"},
    "matplotlib": {"sim/figures/plots.py"},
    "dns": {"control/discovery/nameservers.py"},
    "websockets": {"proxy/sockets/frames.py"},
    "redis": {"extras/redis_store.py"},
    "zmq": {"extras/kv_sockets.py", "sim/mock/serving/kv_publisher.py", "commands/cli.py"},
    "opentelemetry": {"extras/spans.py", "extras/traces.py"},
}
READS_FILES = {
    "extras/installing.py",  # how it was installed
    *("control/admin/key_files.py", "control/admin/dashboard/page.py", "control/discovery/discovery.py"),
    "control/admin/made_token.py",
    *("commands/cli.py", "control/telemetry/memory.py", "control/saving/state_file.py"),
    "control/saving/usage_file.py",
    *("processes/settings_file.py", "workers/shares.py"),
}
PACKAGES = {
    "core": (
        "requests responses engines caches capacity knowledge saved endpoints policies queue sleeping scaling observed "
        "replicas"
    ),
    "control": "probing discovery families sleeping telemetry saving admin",
    "net": "dialing connections",
    "proxy": "request exchange sockets front",
    "sim": "engine workloads fleet figures",
}
"""The packages of a layer: a module imports its own package and those that stand left of it."""
ALONE = {"net/listening", "sim/mock", "sim/engine"}
"""Packages that stand beside the others. What they have in common is `sim/engine`."""
MAX_MODULES = 12
"""In a folder, besides its `__init__`."""
MAX_ATTRIBUTES = 15
"""Of a class that does something: more is two classes."""
LARGE = {
    # plain facts, of which most things need a few
    "Placement": 21,
    "RequestFields": 26,
    "RequestRecord": 43,
    # to be parted
    "Balancer": 18,
    "Choice": 16,
    "ClientConnection": 21,
    "Connection": 16,
    "EndpointState": 25,
    "Engine": 24,
    "Fleet": 16,
    "FixedEngine": 19,
    "FrontEnd": 17,
    "Overload": 18,
    "PoolModel": 23,
    "Proxy": 22,
    "Relay": 22,
    "Ticket": 42,
}
"""Classes that have more, and how many: these numbers only shrink."""
VALUES = {"NamedTuple", "Enum", "Section", "ShortSection", "msgspec.Struct", "Message", "ReplicaEvent"}
"""Bases of classes that are written once, as `frozen=True` is: they may have as many as there are facts."""
SHARED_NAMES = {
    "Step": "of an exchange, and of what the size of a cache is learned from: each is an enum or a tuple of one module",
    "Turn": "a request on a client's connection (docs/architecture.md), and a pass through the queue",
}
"""Names of classes that stand in more than one module, and why they may: their number only shrinks. Who looks for a
name should find the one thing that has it.
"""
MAX_FILE_LINES = 700
"""Without the line of the licence."""
LICENCE = "# SPDX-License-Identifier: Apache-2.0"
MAX_FUNCTION_LINES = 70


def place(file: Path) -> str:
    """The file's path inside the package."""
    return file.relative_to(ROOT).as_posix()


@cache
def tree(file: Path) -> ast.Module:
    """Its syntax, parsed once for all tests."""
    return ast.parse(file.read_text(), str(file))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All of its syntax tree, in no particular order."""
    return tuple(ast.walk(tree(file)))


@cache
def imports(file: Path) -> tuple[str, ...]:
    """The dotted names of everything that a file imports, wherever in it."""
    found = list[str]()
    for node in nodes(file):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(file)}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def layer_of(dotted: str) -> str | None:
    """The layer that a dotted lbproxy name belongs to; None for the package itself (its version)."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == "lbproxy" and len(parts) > 1 and parts[1] != "__version__" else None


def is_pure(file: Path) -> bool:
    does_io = place(file).startswith(
        ("sim/mock/http.py", "sim/mock/sabotage.py", "sim/mock/serving/", "sim/mock/connectors/")
    )
    return place(file).startswith(("core/", "sim/")) and not does_io


def each(files: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make a rule for one file a test of all files, which names each that breaks it: a test for each file costs more
    than the rules.
    """

    def test_of(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for file in files:
                try:
                    rule(file)
                except AssertionError as error:
                    broken.append(f"{place(file)}: {error}")
            assert files
            assert not broken, "\n".join(broken)

        test.__doc__ = rule.__doc__
        return test

    return test_of


@each(FILES)
def test_imports_point_left(file: Path) -> None:
    mine = place(file).split("/")[0].removesuffix(".py")
    if mine in {"__init__", "sim"}:
        return
    for name in imports(file):
        other = layer_of(name)
        if other is None or other == mine:
            continue
        if other == "sim":
            assert RANK[mine] >= RANK["demo"], f"{name}: only the command line's layer may use the simulation"
        else:
            assert RANK[other] < RANK[mine], f"{name} stands right of {mine}, or beside it"


@each([file for file in FILES if place(file).startswith("sim/")])
def test_the_simulation_stands_on_core_alone(file: Path) -> None:
    for name in imports(file):
        assert layer_of(name) in {None, "core", "sim"}, name


@each([file for file in FILES if is_pure(file)])
def test_pure_modules_touch_nothing(file: Path) -> None:
    for name in imports(file):
        assert name.split(".")[0] not in IMPURE, name
    for node in nodes(file):
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
    calls = [node for node in nodes(file) if isinstance(node, ast.Call)]
    methods = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
    functions = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    if place(file) not in READS_FILES:
        assert "open" not in functions
        assert not methods & {"open", "read_text", "read_bytes", "fdopen"}


OWN_TASKS = {
    *("net/connections/pool.py", "net/listening/listener.py", "net/dialing/names.py"),
    *("sim/mock/sabotage.py", "sim/mock/connectors/channel.py"),
}
"""These own what they start, and end it: dialling, accepting (docs/decisions/0009) and resolving, a simulated server's
faults and its calls to others."""


@each([file for file in FILES if place(file) not in OWN_TASKS])
def test_tasks_live_in_task_groups(file: Path) -> None:
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and node.attr in {"create_task", "ensure_future"}:
            assert ast.unparse(node.value) not in {"asyncio", "loop", "self.loop", "self._loop"}, ast.unparse(node)


@each(FILES)
def test_no_cancellation_is_lost(file: Path) -> None:
    """`wait_for` of Python 3.11 swallows one that comes in the same turn as the result: `asyncio.timeout` does not."""
    assert not [
        name for node in nodes(file) if isinstance(node, ast.Attribute) for name in [node.attr] if name == "wait_for"
    ]


@each(FILES)
def test_nothing_grows_too_large(file: Path) -> None:
    assert len(file.read_text().splitlines()) - 1 <= MAX_FILE_LINES
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@each(FILES)
def test_every_module_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(tree(file))


def dotted(file: Path) -> str:
    """The module's name."""
    return ".".join(("lbproxy", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, for their types alone too."""
    names = {dotted(file): file for file in FILES}
    found = {
        name: {one if one in names else one.rpartition(".")[0] for one in imports(file)} for name, file in names.items()
    }
    return {name: (others & names.keys()) - {name} for name, others in found.items()}


def test_no_module_imports_itself_by_way_of_others() -> None:
    left = dict(graph())
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, "these are in a circle, or import one"


@each([file for file in FILES if place(file).split("/")[0] in PACKAGES])
def test_packages_import_to_the_left(file: Path) -> None:
    layer, *inner = place(file).split("/")
    order = PACKAGES[layer].split()
    for other in graph()[dotted(file)]:
        parts = other.split(".")[1:]
        if parts[:1] != [layer] or len(parts) < 3 or len(inner) < 2 or parts[1] == inner[0]:
            continue
        if inner[0] in order:
            assert parts[1] in order[: order.index(inner[0])], f"{other} stands right of {inner[0]}"
        else:
            assert f"{layer}/{parts[1]}" in ALONE, f"{inner[0]} stands alone"


def test_every_file_says_its_licence() -> None:
    top = ROOT.parent
    folders = (ROOT, top / "tests", top / "benchmarks", top / "release")
    for file in (top / "setup.py", *(file for folder in folders for file in folder.rglob("*.py"))):
        first = [line for line in file.read_text().splitlines()[:2] if not line.startswith("#!")]
        assert first[:1] in ([LICENCE], []), file
    assert "Apache License" in (top / "LICENSE").read_text()


def test_folders_are_packages_and_not_heaps() -> None:
    assert {file.name for file in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}, "each module has a folder"
    folders = {file.parent for file in FILES} - {ROOT}
    for folder in folders:
        modules = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(modules) <= MAX_MODULES, f"{folder.relative_to(ROOT)}: {len(modules)} modules"
        said = ast.get_docstring(tree(folder / "__init__.py"))
        assert said, f"{folder.relative_to(ROOT)} does not say what it is for"
        assert not imports(folder / "__init__.py"), "an __init__ exports nothing"


def importers(folder: Path) -> set[str]:
    """What imports modules of a folder: folders and modules of the same layer, and other layers, by name."""
    layer = folder.relative_to(ROOT).parts[0]
    names = {dotted(file) for file in folder.glob("*.py")}
    found = set()
    for file in FILES:
        if file.parent != folder and graph()[dotted(file)] & names:
            other, *inside = file.relative_to(ROOT).with_suffix("").parts
            found.add(other if other != layer else "/".join(inside[:-1]) or inside[0])
    return found


@pytest.mark.parametrize(
    "folder", sorted({file.parent for file in FILES} - {ROOT} - {ROOT / one for one in PACKAGES}), ids=place
)
def test_each_package_says_who_imports_it(folder: Path) -> None:
    """The layers that consist of packages are left out: the diagram of the layers has them."""
    init = folder / "__init__.py"
    line = "Imported by: " + ", ".join(f"`{name}`" for name in sorted(importers(folder))) + "."
    if os.environ.get(WRITE):
        init.write_text(with_importers(init.read_text(), line))
        return
    said = " ".join((ast.get_docstring(tree(init)) or "").split())
    assert line in said, f"{place(init)} must say: {line}\nWith {WRITE}=1 in the environment this test writes it."


def with_importers(text: str, line: str) -> str:
    """The text of an `__init__` with another line of importers; its paragraph is wrapped again."""
    head, found, rest = text.partition("\nImported by: ")
    assert found, f"a paragraph must begin with: {line}"
    paragraph, end, more = re.split(r"(\n\n|\n?\"\"\")", rest, maxsplit=1)
    words = f"{line} {' '.join(paragraph.partition('.')[2].split())}".strip()
    wrapped = textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)
    return f"{head}\n{wrapped}{end}{more}"


def test_no_class_has_too_many_attributes() -> None:
    """However they are declared: in the class, or by what its methods assign."""
    counts = {node.name: len(attributes(node)) for file in FILES for node in classes(file) if not is_value(node)}
    assert {name: count for name, count in counts.items() if count > MAX_ATTRIBUTES} == LARGE


def is_value(node: ast.ClassDef) -> bool:
    """Whether it is never changed once it is made."""
    frozen = [
        word.arg == "frozen"
        for one in ast.walk(ast.Tuple([*node.decorator_list, *node.bases]))
        if isinstance(one, ast.Call)
        for word in one.keywords
    ]
    return any(frozen) or any(ast.unparse(base) in VALUES for base in node.bases)


def test_a_class_has_its_name_for_itself() -> None:
    places = Counter(name for file in FILES for name in {one.name for one in classes(file)})
    assert {name for name, count in places.items() if count > 1} == {*SHARED_NAMES}


def classes(file: Path) -> list[ast.ClassDef]:
    """Its classes, at any depth."""
    return [node for node in nodes(file) if isinstance(node, ast.ClassDef)]


def attributes(node: ast.ClassDef) -> set[str]:
    """What a class declares of itself, or assigns."""
    targets = [
        one for part in node.body for one in ast.iter_child_nodes(part) if isinstance(part, ast.AnnAssign | ast.Assign)
    ]
    declared = {one.id for one in targets if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return (declared - {"__slots__"}) | {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Store)
        and isinstance(one.value, ast.Name)
        and one.value.id == "self"
    }


def test_files_of_tests_can_be_told_apart() -> None:
    """pytest imports them by their names alone, but in folders that are packages: two of one name are an error, though
    only in a run that has both.
    """
    tests = [path for path in ROOT.parent.glob("tests/**/test_*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in tests)
    assert tests
    assert not [name for name, count in names.items() if count > 1]


def test_the_rules_can_fail() -> None:
    """The checks above are worth nothing if they see nothing."""
    assert len(FILES) > 15
    assert any(is_pure(file) for file in FILES)
    assert "orjson" in {name.split(".")[0] for name in imports(ROOT / "core" / "requests" / "openai.py")}
