# SPDX-License-Identifier: Apache-2.0
"""Writes a software bill of materials for each lock file that users install from: `python -m release.sbom dist`.

CycloneDX JSON by cyclonedx-py, which reads names, versions and hashes from the lock file and asks no index: the same
lock file gives the same file, byte for byte. requirements.lock also has setuptools, which the image removes again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lbproxy import __version__
from release.wheels import ENVIRONMENTS, ROOT, run, tools

EXTRAS = ("", "otel", "replicas", "kv-events")
"""Extras that have a lock file of their own; the first is none."""


def write(extra: str, out: Path) -> Path:
    """The bill of one lock file. Returns its path, `lbproxy-VERSION[-EXTRA].cdx.json` in `out`."""
    name = f"-{extra}" if extra else ""
    file = out / f"lbproxy-{__version__}{name}.cdx.json"
    program = ENVIRONMENTS / "tools/bin/cyclonedx-py"
    about = ("--pyproject", "pyproject.toml", "--output-reproducible", "--validate", "--output-file", file.absolute())
    run(program, "requirements", *about, f"requirements{name}.lock", cwd=ROOT)
    bill = json.loads(file.read_text())
    bill["metadata"]["component"]["version"] = __version__  # which is dynamic in pyproject.toml
    file.write_text(json.dumps(bill, indent=2) + "\n")
    return file


def main() -> int:
    """The command line."""
    (name,) = sys.argv[1:]
    out = Path(name)
    out.mkdir(parents=True, exist_ok=True)
    tools()
    for extra in EXTRAS:
        file = write(extra, out)
        print(f"{file.name}: {len(json.loads(file.read_text())['components'])} components", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
