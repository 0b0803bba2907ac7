# SPDX-License-Identifier: Apache-2.0
"""Which hardware and model the simulated server pretends to be: data, and the formula that it is for.

A preset is the coefficients of the step-time formula (`step_ms`; `engine.py` explains it) and the capacities of the
server. A new pair of model and GPU is a new line here and needs no code.

Source of the coefficients: a regression over NVIDIA AIConfigurator's measured operator tables and serving rows for
H100 with vLLM (Qwen3-32B TP2: 1.7 % mean error). The KV capacity of Qwen3-32B on two H100 (307,328 tokens) and a full
8,192-token prefill of 0.40-0.51 s are llm-d's figures, found independently.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

BLOCK_TOKENS = 16
"""Tokens in a KV block: vLLM's default on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model on its hardware. Milliseconds throughout, as in the published tables."""

    host_ms: float
    """Spent on every step, whatever is in it."""
    weights_ms: float
    """Reading the weights once: the floor of a step."""
    token_ms: float
    """Computing one token, once compute and no longer memory is the bound."""
    sequence_ms: float
    """Per sequence in the step: sampling, bookkeeping, kernel overhead."""
    context_ms: float
    """Per 1,000 tokens of context that the step's decodes read."""
    attention_ms: float
    """Per (1,000 tokens)² of prefill attention."""
    kv_tokens: int
    """Size of the KV cache."""
    max_model_len: int
    """`max_position_embeddings` of the model: prompt and output together."""
    token_budget: int = 8192
    """vLLM's `max_num_batched_tokens`: tokens in one step at most."""
    max_sequences: int = 1024
    """vLLM's `max_num_seqs`: running requests at most."""
    max_loras: int = 0
    """vLLM's `max_loras`: distinct LoRA adapters that run together at most; 0 = adapters are not served."""
    api_ms: float = 12.0
    """HTTP parsing and tokenisation, before the scheduler sees the request."""
    transfer_ms: float = 2.0
    """What each transfer of a prompt's KV from another engine takes: handshake, notification."""
    transfer_token_ms: float = 0.008
    """What a transfer takes for each token that is not cached here: 16 GB/s at 128 KB a token."""
    prefix_caching: bool = True
    """vLLM's `enable_prefix_caching`: whether a prompt that begins as an earlier one is computed from there on."""
    pause_s: float = 0.0
    """For so long it stands still, after every `pause_every_s - pause_s` of work: collection of garbage, compilation,
    a neighbour on the machine."""
    pause_every_s: float = 60.0
    pause_at_s: float = 0.0
    """How far the first pause is earlier than after `pause_every_s - pause_s`, so that servers stand in turns."""
    cold_share: float = 0.0
    """Share of the requests that need experts which are not in the GPU's memory, as their content has it."""
    cold_ms: float = 0.0
    """Loading these, which holds up the whole step."""

    def __post_init__(self) -> None:
        if self.kv_tokens < BLOCK_TOKENS:
            raise ValueError(f"kv_tokens must be at least one block of {BLOCK_TOKENS}, got {self.kv_tokens}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must hold a prompt and an answer: at least 2, got {self.max_model_len}")
        # With this, a step always has room for every decode, which the engine relies on.
        if not 1 <= self.max_sequences <= self.token_budget:
            raise ValueError(
                f"max_sequences must be within 1..token_budget ({self.token_budget}), got {self.max_sequences}"
            )
        if not 0 <= self.pause_s < self.pause_every_s:
            raise ValueError(f"pause_s must be below pause_every_s ({self.pause_every_s}), got {self.pause_s}")

    def ends_at(self, begin: float, seconds: float) -> float:
        """When work of so many seconds ends, with the pauses in between. Times are the engine's clock."""
        if not self.pause_s:
            return begin + seconds
        every, worked = self.pause_every_s, self.pause_every_s - self.pause_s
        turns, into = divmod(begin + self.pause_at_s, every)
        turns, into = divmod(turns * worked + min(into, worked) + seconds, worked)
        return turns * every + into - self.pause_at_s

    def is_cold(self, request_id: str) -> bool:
        """Whether a request needs other experts than those in memory: the same ones for every fleet."""
        return crc32(request_id.encode()) < self.cold_share * (1 << 32)

    def step_ms(self, tokens: int, sequences: int, context: int, attention: float) -> float:
        """How long a step of `tokens` in `sequences` takes, whose decodes have `context` computed tokens together.
        `attention`: of its prefills, in tokens².
        """
        # `float`: typeshed has ** yield Any, as a negative base would make it complex.
        matmul = float((self.weights_ms**1.5 + (self.token_ms * tokens) ** 1.5) ** (2 / 3))
        return (
            self.host_ms
            + matmul
            + self.sequence_ms * sequences
            + self.context_ms * context / 1e3
            + self.attention_ms * attention / 1e6
        )


PRESETS: dict[str, Preset] = {
    "llama-8b-h100": Preset(
        host_ms=1.0,
        weights_ms=5.8,
        token_ms=0.0210,
        sequence_ms=0.040,
        context_ms=0.046,
        attention_ms=0.80,
        kv_tokens=432_000,
        max_model_len=131_072,
    ),
    "qwen-32b-2xh100": Preset(
        host_ms=1.0,
        weights_ms=13.3,
        token_ms=0.0540,
        sequence_ms=0.068,
        context_ms=0.044,
        attention_ms=1.65,
        kv_tokens=307_200,
        max_model_len=40_960,
    ),
    "qwen-32b-4xh100": Preset(
        host_ms=1.0,
        weights_ms=8.4,
        token_ms=0.0316,
        sequence_ms=0.063,
        context_ms=0.022,
        attention_ms=0.85,
        kv_tokens=820_000,
        max_model_len=40_960,
    ),
    "llama-70b-fp8-4xh100": Preset(
        host_ms=1.0,
        weights_ms=9.8,
        token_ms=0.0310,
        sequence_ms=0.075,
        context_ms=0.025,
        attention_ms=1.1,
        kv_tokens=700_000,
        max_model_len=131_072,
    ),
}
