# SPDX-License-Identifier: Apache-2.0
"""The real servers' model, in which prompts cost what they should: made here, so that nothing is fetched.

Run by the servers' own Python: `.real/venv/bin/python -m benchmarks.routing_real.model FOLDER`.

Random weights from a fixed seed, six layers: one core computes about 2,000 tokens of a prompt a second, so that a
prompt found in a cache is answered many times sooner. Its tokenizer has a token for each word of the simulator's texts
(`lbproxy.sim.workloads.prompts`): what a piece calls a token is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lbproxy.sim.workloads.prompts import Piece, piece_text
from tests.real.model import Shape, new_snapshot, write_tokenizer, write_weights

SHAPE = Shape(hidden=384, intermediate=1024, heads=12, layers=6, positions=4096, vocabulary=4096)
TRAINING = Piece(1, 200_000)


def main(folder: Path) -> None:
    """Write FOLDER/hub."""
    snapshot = new_snapshot(folder)
    write_tokenizer(snapshot, [piece_text(TRAINING).decode()], SHAPE.vocabulary)
    write_weights(snapshot, SHAPE)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
