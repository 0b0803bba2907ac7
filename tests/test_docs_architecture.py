"""docs/architecture.md names every room, with what its `__init__` says of it and the modules that it has."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.docs import DOCS, ROOT, expect_generated, table
from tests.test_architecture import ROOMS

PACKAGE = ROOT / "lbproxy"
LAYERS = ("config", "core", "net", "proxy", "control", "extras", "sim", "demo", "terminal")


def about(folder: Path) -> str:
    """The first line of what it says of itself, without its end."""
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    return said.partition("\n\n")[0].replace("\n", " ").rstrip(".")


def folders() -> list[Path]:
    """Layers, each followed by its folders in the order in which they may import each other."""
    found = []
    for layer in LAYERS:
        found.append(PACKAGE / layer)
        order = ROOMS.get(layer, "").split()
        inside = {one.parent.relative_to(PACKAGE / layer) for one in (PACKAGE / layer).glob("*/**/__init__.py")}
        ranks = {one: order.index(one.parts[0]) if one.parts[0] in order else len(order) for one in inside}
        found += [PACKAGE / layer / one for one in sorted(inside, key=lambda one: (ranks[one], one))]
    return found


def test_every_room_is_on_the_page() -> None:
    rows = []
    for folder in folders():
        modules = sorted(one.stem for one in folder.glob("*.py") if one.stem != "__init__")
        name = folder.relative_to(PACKAGE).as_posix()
        rows.append([f"**{name}/**" if "/" not in name else f"{name}/", about(folder), ", ".join(modules)])
    expect_generated(DOCS / "architecture.md", "rooms", table(["folder", "what it is for", "modules"], rows))
