# SPDX-License-Identifier: Apache-2.0
"""A language model small enough for a test, and three LoRA adapters of it: made here, so that nothing is fetched.

Run by the servers' own Python, in the environment that they are installed in:

    .real/venv/bin/python tests/real/model.py FOLDER

The model has 2 layers and random weights from a fixed seed. What it says means nothing, but greedily it says the same
thing every time, on every server, and each adapter makes it say something else; that is all a proxy's test needs. Its
tokenizer is trained on the documentation inside Python's own standard library. FOLDER becomes a cache as Hugging
Face's libraries keep it, because `transformers serve` lists the models of such a cache under their names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]

import torch  # type: ignore[import-not-found, unused-ignore]
from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found, unused-ignore]
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

REVISION = "0" * 40
ADAPTERS = ("a", "b", "c")
END, PAD = "<|endoftext|>", "<|pad|>"
SPECIALS = [END, "<|im_start|>", "<|im_end|>", PAD]
VOCABULARY, HEAD, RANK = 1024, 32, 8
# Wide enough that tokens differ much in likelihood: rounding does not decide what is said.
WEIGHTS_STD, ADAPTER_STD = 0.6, 0.5


@dataclass(frozen=True)
class Shape:
    """Of a model with attention heads of `HEAD` and a single key-value head."""

    hidden: int = 64
    intermediate: int = 128
    heads: int = 2
    layers: int = 2
    positions: int = 2048
    vocabulary: int = VOCABULARY


TINY = Shape()
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int = VOCABULARY) -> None:
    """A byte-level BPE, trained on these texts, with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT
    fast.save_pretrained(folder)


def write_weights(folder: Path, shape: Shape = TINY) -> None:
    """Random ones, from a fixed seed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=1,
        head_dim=HEAD,
        max_position_embeddings=shape.positions,
        initializer_range=WEIGHTS_STD,
        dtype="float32",
        bos_token_id=SPECIALS.index(END),
        eos_token_id=SPECIALS.index(END),
        pad_token_id=SPECIALS.index(PAD),
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIALS)] = 0  # never the likeliest: an answer is as long as was asked for
    model.save_pretrained(folder)


def write_adapter(folder: Path, seed: int) -> None:
    """In PEFT's format, which vLLM reads; PEFT itself is not needed to write it."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(TINY.layers):
        for name, outputs in (("q_proj", TINY.heads * HEAD), ("v_proj", HEAD)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, TINY.hidden, generator=random) * ADAPTER_STD
            weights[f"{stem}.lora_B.weight"] = torch.randn(outputs, RANK, generator=random) * ADAPTER_STD
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def new_snapshot(folder: Path) -> Path:
    """An empty folder for the model's files, in a cache that is made in FOLDER/hub."""
    repository = folder / "hub" / "models--lbproxy--tiny"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    return snapshot


def main(folder: Path) -> None:
    """Write FOLDER/hub (the model) and FOLDER/adapters."""
    snapshot = new_snapshot(folder)
    write_tokenizer(snapshot, [topics[name] for name in sorted(topics)])
    write_weights(snapshot)
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder / "adapters" / name, seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
