# SPDX-License-Identifier: Apache-2.0
"""`lbproxy usage`: who used how many tokens, by day, flow and model.

A running lbproxy is asked, which knows it of all of its replicas. Of several the rows are added. If none runs, the
files that it left are read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from lbproxy.commands.client import AdminClient, AdminError, Fields
from lbproxy.commands.tables import tokens
from lbproxy.config.tree import Settings
from lbproxy.control.saving.state_file import read
from lbproxy.control.saving.usage_file import once, read_usage, rows_of, usage_path
from lbproxy.core.saved.reading import SavedError

COUNTS = ("prompt_uncached", "prompt_cached", "completion", "estimated")
ALONE = "of one replica alone, as the store of the replicas was not asked or does not respond"
NOT_KEPT = "without `state.file` in the settings nothing is kept over a restart: this is since the start"


def usage(
    urls: Sequence[str], settings: Settings | None, token: str | None, console: Console, *, days: int, as_json: bool
) -> int:
    """Show it. Returns the exit code. `settings`: where nothing runs. Raises AdminError."""
    try:
        parts = [_asked(url, token, days, own=len(urls) > 1) for url in urls]
        if not parts:
            raise AdminError("`admin` is not set in these settings")
    except AdminError:
        if settings is None:
            raise
        parts = [_of_files(settings, days)]
    rows, kept = added([row for part in parts for row in part["rows"]]), all(part["kept"] for part in parts)
    if as_json:
        console.print_json(json.dumps({"kept": kept, "rows": rows}))
        return 0
    console.print(tokens(rows, len(rows)) or "no tokens were used")
    if len(parts) == 1 and not parts[0]["all_replicas"]:
        console.print(Text(ALONE, style="yellow"))
    if not kept:
        console.print(Text(NOT_KEPT, style="yellow"))
    return 0


def _asked(url: str, token: str | None, days: int, *, own: bool) -> Fields:
    with contextlib.closing(AdminClient(url, token)) as client:
        return client.get("usage", days=days, own=int(own))


def _of_files(settings: Settings, days: int) -> Fields:
    """What a process left. Raises AdminError."""
    path = settings.state.file
    if path is None:
        raise AdminError("no lbproxy responds, and without `state.file` in the settings none left anything")
    try:
        uses = read_usage(usage_path(path))
        with contextlib.suppress(FileNotFoundError):
            uses += read(path).tokens.values()
    except (OSError, SavedError) as error:
        raise AdminError(f"no lbproxy responds, and {path} cannot be used: {error}") from None
    return {"kept": True, "all_replicas": settings.replicas.url is None, "rows": rows_of(once(uses), days)}


def added(rows: Sequence[Fields]) -> list[Fields]:
    """Those of the same day, flow and model as one; newest first, then those that used most."""
    sums: dict[tuple[str, str, str | None], Fields] = {}
    for row in rows:
        key = row["day"], row["flow"], row["model"]
        one = sums.setdefault(key, {**row, **dict.fromkeys(COUNTS, 0)})
        for name in COUNTS:
            one[name] += row[name]
    return sorted(sums.values(), key=lambda one: (one["day"], sum(one[name] for name in COUNTS[:3])), reverse=True)
