# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that counts as the simulated server does, in Hugging Face's format: load generators ask for one.

They make prompts of so many tokens by turning random tokens into text, and some count the tokens of what they sent. A
token of the simulated server is four bytes (`lbproxy.sim.mock.text`). So it is here, for ASCII: each token is three
letters and a space, and every other four characters count as one token, too.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase

END = "<|endoftext|>"
MAX_TOKENS = 32768


def write_tokenizer(folder: Path) -> None:
    """Write its files into a new folder."""
    words = ["".join(letters) + " " for letters in product(ascii_lowercase, repeat=3)]
    vocabulary = {word: n for n, word in enumerate([END, *words])}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    pieces = {"type": "Split", "pattern": {"Regex": r"[\s\S]{1,4}"}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 0, "content": END, **special}],
        "normalizer": None,
        "pre_tokenizer": pieces,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "the "},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": MAX_TOKENS,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": len(vocabulary), **ends}
    folder.mkdir(parents=True)
    for name, content in (("tokenizer", tokenizer), ("tokenizer_config", settings), ("config", model)):
        (folder / f"{name}.json").write_text(json.dumps(content))
