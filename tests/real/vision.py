# SPDX-License-Identifier: Apache-2.0
"""Two models that see, small enough for a test: made here, so that nothing is fetched.

    .real/venv/bin/python tests/real/vision.py FOLDER

FOLDER/pixels is a Qwen2-VL: an image has a token for each 28 x 28 pixels. FOLDER/fixed is a LLaVA 1.5: an image has 144
tokens, whatever its size. Engines in between cut an image into tiles of a fixed number of tokens each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-untyped, unused-ignore]
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from model import CHAT, HEAD, SPECIALS, TINY, VOCABULARY, WEIGHTS_STD, write_tokenizer  # type: ignore[import-not-found, unused-ignore]
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found, unused-ignore]
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

POSITIONS = 32_768
PATCH = 14
"""Pixels, of either model."""
PIXELS_PER_TOKEN = (2 * PATCH) ** 2
SIDE = 12
"""Of LLaVA: an image is so many patches wide and high."""
SEEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
COLOURS = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
CONTENT = "{{ m['content'] }}"
"""Of a message, in the language model's template."""


def write_text(folder: Path, image: str) -> dict[str, int]:
    """The tokenizer, with a template in which an image is this text; the ids of `SEEN`."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, [topics[name] for name in sorted(topics)], VOCABULARY - len(SEEN))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SEEN})
    part = "{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}" + image + "{% endif %}"
    parts = "{% for p in m['content'] %}" + part + "{% endfor %}"
    tokenizer.chat_template = CHAT.replace(
        CONTENT, "{% if m['content'] is string %}" + CONTENT + "{% else %}" + parts + "{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return {name: tokenizer.convert_tokens_to_ids(name) for name in SEEN}


def text_settings() -> dict[str, Any]:
    """Of a language model."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": TINY.hidden,
        "intermediate_size": TINY.intermediate,
        "num_hidden_layers": TINY.layers,
        "num_attention_heads": TINY.heads,
        "num_key_value_heads": 1,
        "max_position_embeddings": POSITIONS,
        "initializer_range": WEIGHTS_STD,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }


def save(model: Any, folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Its weights, with which no response ends by itself, and the settings of what prepares images."""
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIALS)] = 0
        model.lm_head.weight[VOCABULARY - len(SEEN) :] = 0
    model.float().save_pretrained(folder)
    for name, settings in files.items():
        (folder / name).write_text(json.dumps(settings))


def write_pixels(folder: Path) -> None:
    """Qwen2-VL (arXiv 2409.12191, section 2.1)."""
    ids = write_text(folder, "<|vision_start|><|image_pad|><|vision_end|>")
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2VLConfig(
        text_config={**text_settings(), "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": HEAD, "hidden_size": TINY.hidden, "num_heads": 1, "mlp_ratio": 2},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    bounds = {"min_pixels": 4 * PIXELS_PER_TOKEN, "max_pixels": 16_384 * PIXELS_PER_TOKEN}
    patches = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    image = {"processor_class": "Qwen2VLProcessor", **bounds, **patches, **COLOURS}
    files = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **image},
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor", **image},
    }
    save(Qwen2VLForConditionalGeneration(config), folder, files)


def write_fixed(folder: Path) -> None:
    """LLaVA 1.5 (arXiv 2310.03744)."""
    ids = write_text(folder, "<|image_pad|>")
    torch.manual_seed(0)
    side = SIDE * PATCH
    vision = CLIPVisionConfig(
        hidden_size=HEAD,
        intermediate_size=2 * HEAD,
        num_hidden_layers=2,
        num_attention_heads=1,
        image_size=side,
        patch_size=PATCH,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**text_settings(), head_dim=HEAD),
        image_token_index=ids["<|image_pad|>"],
        image_seq_length=SIDE**2,
        tie_word_embeddings=False,
    )
    processor = {"processor_class": "LlavaProcessor"}
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, "do_center_crop": True}
    places = {"image_token": "<|image_pad|>", "patch_size": PATCH, "num_additional_image_tokens": 1}
    files = {
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", **processor, **size, **COLOURS},
        "processor_config.json": {**processor, **places, "vision_feature_select_strategy": "default"},
    }
    save(LlavaForConditionalGeneration(config), folder, files)
    weights = load_file(folder / "model.safetensors")  # as published checkpoints have them, which vLLM expects
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in weights}
    save_file({names[name]: one for name, one in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def main(folder: Path) -> None:
    """Write FOLDER/pixels and FOLDER/fixed."""
    write_pixels(folder / "pixels")
    write_fixed(folder / "fixed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
