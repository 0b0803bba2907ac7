# SPDX-License-Identifier: Apache-2.0
"""`make chaos`: the faults of docs/reliability.md with all their counts, and the figures kept for its tables.

    python -m tests.chaos [--peer NAME] [--form fast|full] [--seconds N] [--seed N] [--settings TEXT]
                          [pytest's own arguments]

`--peer` tests another proxy in lbproxy's place, of which nothing is demanded. `--soak` runs T40 alone. What ran is kept
in tests/chaos/results/NAME.jsonl, but with further `--settings`; LBPROXY_WRITE_DOCS=1 with tests/test_docs_tables.py
then writes the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.chaos.report import RESULTS, Line, lines

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--peer", default="lbproxy", help="nginx, sglang-router, vllm-router")
    parser.add_argument("--peers-folder", help="where their programs are (default: .bench/venv/bin, then the path)")
    parser.add_argument("--form", default="fast", choices=["short", "fast", "full"])
    parser.add_argument("--soak", action="store_true", help="only the soak, 30 minutes if --seconds does not say")
    parser.add_argument("--seconds", type=float, help="of the soak")
    parser.add_argument("--seed", type=int, default=1, help="of the soak")
    parser.add_argument("--settings", help="further ones of lbproxy, such as 'stream_keepalive: 1s'")
    args, rest = parser.parse_known_args(arguments)
    environ = {**os.environ, "LBPROXY_CHAOS_FORM": args.form, "LBPROXY_CHAOS_PROXY": args.peer}
    environ["LBPROXY_CHAOS_SEED"] = str(args.seed)
    if args.settings:
        environ["LBPROXY_CHAOS_SETTINGS"] = args.settings
    if args.peers_folder:
        environ["LBPROXY_CHAOS_PEERS"] = args.peers_folder
    if args.seconds or args.soak:
        environ["LBPROXY_CHAOS_SECONDS"] = str(args.seconds or 1800)
    target = HERE / "test_soak.py" if args.soak else HERE
    fresh = RESULTS / f"{args.peer}.new"
    fresh.parent.mkdir(exist_ok=True)
    fresh.unlink(missing_ok=True)
    environ["LBPROXY_CHAOS_RESULTS"] = str(fresh)
    code = subprocess.call([sys.executable, "-m", "pytest", "-s", "-q", str(target), *rest], env=environ)
    if fresh.exists() and not args.settings:
        merge(args.peer, fresh)
    return code


def merge(name: str, fresh: Path) -> None:
    """Let what ran replace what was known of it."""
    old = lines(name)
    fresh.rename(RESULTS / f"{name}.run.jsonl")
    new = lines(f"{name}.run")
    (RESULTS / f"{name}.run.jsonl").unlink()
    write(name, {**old, **new})


def write(name: str, known: dict[str, Line]) -> None:
    text = "".join(json.dumps(known[test]) + "\n" for test in sorted(known))
    (RESULTS / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
