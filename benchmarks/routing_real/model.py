# SPDX-License-Identifier: Apache-2.0
"""The real servers' model, in which prompts cost what they should: made here, so that nothing is fetched.

Run by the servers' own Python: `.real/venv/bin/python -m benchmarks.routing_real.model FOLDER [gpu]`.

Random weights from a fixed seed, six layers: one core computes about 2,000 tokens of a prompt a second, so that a
prompt found in a cache is answered many times sooner. Its tokenizer has a token for each word of the simulator's texts
(`lbproxy.sim.workloads.prompts`): what a piece calls a token is one. For a GPU, the shape is that of Llama 3 8B with
24 of its 32 layers, and no weights are written: vLLM makes them up (`--load-format dummy`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lbproxy.sim.workloads.prompts import Piece, piece_text
from tests.real.model import Shape, new_snapshot, write_tokenizer, write_weights

SHAPE = Shape(hidden=384, intermediate=1024, heads=12, layers=6, positions=4096, vocabulary=4096)
TRAINING = Piece(1, 200_000)
GPU_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "vocab_size": SHAPE.vocabulary,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def main(folder: Path, *, gpu: bool) -> None:
    """Write FOLDER/hub."""
    snapshot = new_snapshot(folder)
    write_tokenizer(snapshot, [piece_text(TRAINING).decode()], SHAPE.vocabulary)
    if gpu:
        (snapshot / "config.json").write_text(json.dumps(GPU_CONFIG))
    else:
        write_weights(snapshot, SHAPE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), gpu="gpu" in sys.argv[2:])
