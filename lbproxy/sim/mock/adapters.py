# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapters that one simulated server serves, by vLLM's rules: its list, its load and unload, its metric.

Which adapters have a slot, and what loading costs, is the engine's (`lora_slots.py`). Shapes and messages are vLLM
0.32's (vllm/entrypoints/openai/models/serving.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from lbproxy.sim.mock.apis.fields import EngineError, Json

MAX_ADAPTERS = 1024
MAX_SERIES = 64
"""vLLM keeps every series that it ever showed; here the oldest go, so that pages stay small."""
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Adapters:
    """Those of one server. `names` are those that it starts with. Raises ValueError for names that cannot be."""

    def __init__(self, model: str, names: Sequence[str]) -> None:
        for name in names:
            if not name or name == model or names.count(name) > 1 or "," in name:
                raise ValueError(f"adapters must have names of their own without commas, got {name!r}")
        self._model = model
        self._paths = {name: f"/adapters/{name}" for name in names}
        self._series: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def load(self, fields: Json) -> str:
        """POST /v1/load_lora_adapter: serve one more from now on. Returns what the client is told. Raises ApiError."""
        name, path = _text(fields, "lora_name"), _text(fields, "lora_path")
        if not name or not path:
            raise _wrong("Both 'lora_name' and 'lora_path' must be provided.")
        if name == self._model:
            raise _wrong(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self._paths and fields.get("load_inplace") is not True:
            raise _wrong(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True."
            )
        if "," in name or len(self._paths) >= MAX_ADAPTERS:
            raise _wrong(f"The lora adapter '{name}' cannot be simulated.")
        self._paths[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, fields: Json) -> tuple[str, str]:
        """POST /v1/unload_lora_adapter: which one it was, and what the client is told. Raises ApiError."""
        name = _text(fields, "lora_name")
        if not name:
            raise _wrong("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._paths:
            raise EngineError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self._paths[name]
        return name, f"Success: LoRA adapter '{name}' removed successfully."

    def cards(self, created: int) -> list[Json]:
        """Their entries in /v1/models."""
        return [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": path,
                "parent": self._model,
                "max_model_len": None,
                "permission": [],
            }
            for name, path in self._paths.items()
        ]

    # The metric

    def stepped(self, running: Sequence[str], wall_time: float) -> None:
        """A step ended, with requests for these adapters still running.

        As in vLLM, that is what `vllm:lora_requests_info` shows from now on: the adapters with live requests and no
        others, as a series of its own whose value is the time, beside all the series of before. Nothing is shown
        before the first request for an adapter.
        """
        if not running and not self._series:
            return
        label = ",".join(running)
        self._series[label] = wall_time
        self._series.move_to_end(label)
        if len(self._series) > MAX_SERIES:
            self._series.popitem(last=False)

    @property
    def series(self) -> Mapping[str, float]:
        """Of the metric: running adapters, joined by commas -> when it was last so."""
        return self._series


def _text(fields: Json, name: str) -> str:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise EngineError(400, f"1 validation error:\n  '{name}': Input should be a valid string", "Bad Request", name)
    return value or ""


def _wrong(message: str) -> EngineError:
    return EngineError(400, message, "InvalidUserInput")
