# SPDX-License-Identifier: Apache-2.0
"""The text of a release: its part of the changelog, and how its wheels are installed.

    python -m release.notes dist https://host/owner/lbproxy/releases/download/v1.2.3    # after `make wheels`

Each wheel is named by its URL, since lbproxy is on no index: what carries its name there would be somebody else's.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from lbproxy import __version__
from release.wheels import ROOT


def install_lines(wheel: str) -> list[str]:
    """The commands that install a wheel, by its URL or path, or run it without that."""
    return [f"pipx install '{wheel}'", f"uvx --from '{wheel}' lbproxy demo"]


def runs_on(name: str) -> str:
    """On what a wheel runs, by the tags in its name."""
    python, _, platform = name.removesuffix(".whl").split("-")[-3:]
    if platform == "any":
        return "any Python from 3.11 on, any Unix; not compiled: a request takes twice the CPU"
    machine = "ARM" if "aarch64" in platform else "x86-64"
    return f"Python {python[2]}.{python[3:]}, {'Alpine' if 'musllinux' in platform else 'Linux'}, {machine}"


def notes(changelog: str, wheels: list[str], base: str) -> str:
    """Markdown. `wheels`: their names; `base`: where they are downloaded from. Raises ValueError if the changelog has
    nothing of this version.
    """
    match = re.search(rf"^## {re.escape(__version__)} - .*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"the changelog has nothing of {__version__}")
    blocks = [
        f"{runs_on(name)}:\n\n```sh\n{''.join(f'{line}{chr(10)}' for line in install_lines(f'{base}/{name}'))}```\n"
        for name in sorted(wheels)
    ]
    return f"{match[1].strip()}\n\n## Install\n\nOne of these, and no compiler is needed.\n\n" + "\n".join(blocks)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m release.notes")
    parser.add_argument("folder", type=Path, help="the folder with the wheels")
    parser.add_argument("base", help="the URL below which they are downloaded")
    args = parser.parse_args()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    print(notes(changelog, [wheel.name for wheel in args.folder.glob("*.whl")], args.base), end="")


if __name__ == "__main__":
    main()
