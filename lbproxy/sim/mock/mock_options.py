# SPDX-License-Identifier: Apache-2.0
"""What one simulated server is like: the options of `lbproxy mock`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from lbproxy.sim.engine.fixed import FirstTokenSpread, FixedTimes
from lbproxy.sim.engine.on_demand import LM_STUDIO_KEEP_S, OLLAMA_KEEP_S, Loading
from lbproxy.sim.engine.presets import PRESETS, Preset
from lbproxy.sim.mock.adapters import MAX_ADAPTERS, Adapters
from lbproxy.sim.mock.faults import parse_faults

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "ollama": "Ollama", "lmstudio": "LM Studio"}
"""Whom it can play, by the name that the settings of lbproxy use, and what each is called."""
ROLES = ("both", "prefill", "decode")
CONNECTORS = {"nixl": "vllm", "shared-storage": "vllm", "sglang": "sglang", "mooncake": "vllm"}
"""And the engine that each belongs to."""

MAX_RANKS = 64
_PREFIX = re.compile(r"(/[\w.~-]+)+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class MockOptions:
    """One simulated server: what the options mean is in the help of `lbproxy mock`. Raises ValueError for what cannot
    be.
    """

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "sim"
    preset: str = "llama-8b-h100"
    """A key of `presets.PRESETS`."""
    kv_tokens: int | None = None
    prefix_cache: bool = True
    """A prompt that begins as an earlier one is computed from there on."""
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    """Prompt and output together; None = the preset's. Never more than the KV cache holds."""
    ranks: int = 1
    """Data-parallel engines behind the address, each with the whole of the preset."""
    ttft: float | None = None
    """Seconds to each first token, whatever else it does; None = an engine. Of the preset only sizes count then."""
    ttft_spread: float = 0.0
    ttft_form: Literal["uniform", "lognormal", "bimodal", "heavy", "prompt"] = "uniform"
    """See `FirstTokenSpread`."""
    token_time: float = 0.02
    stream_interval: int = 1
    """Tokens of text in one event of a stream, after the first. vLLM's option."""
    speed: float = 1.0
    seed: int = 0
    """The seed of responses and of jitter. Servers with the same seed answer alike."""
    engine: Literal["vllm", "sglang", "llamacpp", "ollama", "lmstudio"] = "vllm"
    """Whose name its models carry, and how it describes itself; all else is vLLM's. Only vLLM shows metrics: the others
    do not unless they are told to."""
    metric_names: Literal["current", "old"] = "current"
    keep_alive_s: float = 5.0
    """How long an idle connection stays open: uvicorn's default."""
    faults: tuple[str, ...] = ()
    """What it does wrong from the start: see `faults.py`."""
    adapters: tuple[str, ...] = ()
    max_loras: int = 1
    max_loaded: int = 3
    """Models in memory at a time, with engine ollama or lmstudio: `adapters` are further models then. With llamacpp,
    too, which is a router if there are any."""
    load_time: float = 0.0
    """Seconds that loading one takes."""
    lora_updates: bool = False
    role: Literal["both", "prefill", "decode"] = "both"
    connector: Literal["nixl", "shared-storage", "sglang", "mooncake"] | None = None
    kv_lease: float | None = None
    """Seconds for which prefilled KV is held, and for which the halves of a request wait for each other; None = the
    connector's: 30 with nixl, 300 with sglang, 480 with mooncake."""
    kv_load_failure: Literal["fail", "recompute"] = "fail"
    """nixl: of a prompt whose KV cannot be loaded. vLLM's `kv_load_failure_policy`."""
    side_channel_port: int = 0
    bootstrap_port: int | None = None
    shared_storage_path: str | None = None

    kv_events: str | None = None
    """Where KV events are published: `tcp://*:port` is bound, `tcp://host:port` connected to; None = nowhere."""
    kv_events_replay: str | None = None
    sleep_mode: bool = False
    asleep: bool = False
    sleep_level: int = 1
    """At which it sleeps then."""
    wake_time: float = 3.0
    sleep_time: float = 1.0
    gpu: str | None = None
    """Name of a GPU that it shares with other simulated servers on this machine: only one that is awake has memory."""

    provider: bool = False
    """It is a paid provider (`serving.provider`); any of the following makes it one as well."""
    path_prefix: str | None = None
    require_key: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        self._check_transfer()
        self._check_sleep()
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.metric_names not in ("current", "old"):
            raise ValueError(f"metric_names must be 'current' or 'old', got {self.metric_names!r}")
        if not 0 < self.speed < float("inf"):
            raise ValueError(f"speed must be a positive number, got {self.speed}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if not 1 <= self.max_loras <= MAX_ADAPTERS:
            raise ValueError(f"max_loras must be within 1..{MAX_ADAPTERS}, got {self.max_loras}")
        if self.stream_interval < 1:
            raise ValueError(f"stream_interval must be at least 1, got {self.stream_interval}")
        if self.max_loaded < 1 or not 0 <= self.load_time < float("inf"):
            raise ValueError("max_loaded must be at least 1, and load_time a number of seconds")
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks must be within 1..{MAX_RANKS}, got {self.ranks}")
        if self.ttft is not None and self.ranks > 1:
            raise ValueError("ranks must be 1 with ttft")
        if self.kv_events is not None and self.ttft is not None:
            raise ValueError("kv_events needs an engine with a cache, which there is none with ttft")
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ValueError("kv_events_replay needs kv_events")
        self._check_provider()
        self.times()
        Adapters(self.model, self.adapters)
        self.hardware()
        parse_faults("\n".join(self.faults))

    def _check_sleep(self) -> None:
        if self.asleep and not self.sleep_mode:
            raise ValueError("asleep needs sleep_mode")
        if self.sleep_level not in (1, 2):
            raise ValueError(f"sleep_level must be 1 or 2, got {self.sleep_level}")
        if not (0 <= self.wake_time < float("inf") and 0 <= self.sleep_time < float("inf")):
            raise ValueError("wake_time and sleep_time must be numbers of seconds")
        if self.gpu is not None and not (self.gpu.isidentifier() and len(self.gpu) <= 64):
            raise ValueError(f"gpu must be letters, digits and underscores, got {self.gpu!r}")

    def _check_transfer(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        if self.connector is not None and self.connector not in CONNECTORS:
            raise ValueError(f"connector must be one of {', '.join(CONNECTORS)}, got {self.connector!r}")
        if self.connector is None and self.role != "both":
            raise ValueError(f"a role of {self.role} needs a connector: {', '.join(CONNECTORS)}")
        if self.connector is not None and self.engine != CONNECTORS[self.connector]:
            raise ValueError(f"connector {self.connector} needs engine {CONNECTORS[self.connector]}, got {self.engine}")
        if self.connector is not None and self.ttft is not None:
            raise ValueError("connector cannot be given with ttft")
        if (self.connector == "shared-storage") != (self.shared_storage_path is not None):
            raise ValueError("connector shared-storage needs shared_storage_path, and no other has it")
        for port in (self.side_channel_port, self.bootstrap_port or 0):
            if not 0 <= port <= 65535:
                raise ValueError(f"a port must be within 0..65535, got {port}")
        if self.kv_lease is not None and not 0 < self.kv_lease < float("inf"):
            raise ValueError(f"kv_lease must be a positive number, got {self.kv_lease}")
        if self.kv_load_failure not in ("fail", "recompute"):
            raise ValueError(f"kv_load_failure must be 'fail' or 'recompute', got {self.kv_load_failure!r}")

    def _check_provider(self) -> None:
        prefix = self.path_prefix
        if prefix is not None and not _PREFIX.fullmatch(prefix):
            raise ValueError(f"path_prefix must be like /openai/v1, got {prefix!r}")
        if self.require_key is not None and not (self.require_key.isascii() and self.require_key.isprintable()):
            raise ValueError("require_key must be printable ASCII")
        for name in ("requests_per_minute", "tokens_per_minute"):
            limit: int | None = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"{name} must be at least 1, got {limit}")
        if self.is_provider and self.connector is not None:
            raise ValueError("a provider has no connector")

    @property
    def is_provider(self) -> bool:
        """Is it a paid provider?"""
        given = (self.path_prefix, self.require_key, self.requests_per_minute, self.tokens_per_minute)
        return self.provider or any(one is not None for one in given)

    def times(self) -> FixedTimes | None:
        """Those of a server whose times are fixed; None = it is an engine."""
        if self.ttft is None:
            return None
        form, spread = FirstTokenSpread(self.ttft_form), self.ttft_spread
        return FixedTimes(ttft_s=self.ttft, ttft_spread=spread, form=form, token_s=self.token_time)

    def hardware(self) -> Preset:
        """The preset with the overrides applied."""
        preset = PRESETS[self.preset]
        return replace(
            preset,
            kv_tokens=preset.kv_tokens if self.kv_tokens is None else self.kv_tokens,
            max_sequences=preset.max_sequences if self.max_num_seqs is None else self.max_num_seqs,
            prefix_caching=self.prefix_cache,
            max_loras=self.max_loras if (self.adapters or self.lora_updates) and self.loading() is None else 0,
        )

    def loading(self) -> Loading | None:
        """What a server that loads models on demand needs for that; None = it is none."""
        is_router = self.engine == "llamacpp" and len(self.adapters) > 0
        if self.engine not in ("ollama", "lmstudio") and not is_router:
            return None
        return Loading(
            load_s=dict.fromkeys((self.model, *self.adapters), self.load_time),
            most=self.max_loaded,
            keep_s=inf if is_router else LM_STUDIO_KEEP_S if self.engine == "lmstudio" else OLLAMA_KEEP_S,
            holds_up=self.engine == "ollama",
        )
