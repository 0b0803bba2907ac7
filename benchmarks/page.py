# SPDX-License-Identifier: Apache-2.0
"""Pages of two parts, each written by a command of its own: in virtual time, and after it over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

HERE = Path(__file__).parent


class Page(NamedTuple):
    """One of them."""

    path: Path
    over_http: str
    """The heading of its second part."""

    def write_virtual(self, text: str) -> None:
        """Write this in place of the first part."""
        _, marker, rest = self._kept().partition(f"# {self.over_http}\n")
        self.path.write_text(text + (f"\n{marker}{rest}" if marker else ""), "utf-8")

    def write_over_http(self, text: str) -> None:
        """Write this, which begins with its heading, in place of the second part."""
        self.path.write_text(f"{self._kept().partition(f'# {self.over_http}')[0].rstrip()}\n\n{text}", "utf-8")

    def _kept(self) -> str:
        return self.path.read_text("utf-8") if self.path.exists() else ""


AGENTS_PAGE: Final = Page(HERE / "AGENTS.md", "Coding agents, over HTTP")
PUBLISHED_PAGE: Final = Page(HERE / "PUBLISHED.md", "Published traffic, over HTTP")
