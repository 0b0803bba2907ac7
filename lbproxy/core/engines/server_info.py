"""What an engine says of itself beside its metrics: how much its KV cache holds, and how many requests it runs at once.

SGLang and llama.cpp show metrics only if they are started so, and describe themselves always. Which page that is and
what stands there is data of this module; asking for it is the prober's. What is read comes from outside and is not
trusted: whatever is no plain number within bounds is unknown, and nothing is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import orjson

from lbproxy.core.requests.openai import ModelCard

MOST_TOKENS = 1_000_000_000
"""As for `kv_cache_tokens` in the settings: more is no size, but a mistake."""


class Description(NamedTuple):
    """What a page says. None: it does not."""

    tokens: int | None
    """That all KV caches behind the address hold together."""
    at_most: bool
    """They may hold less."""
    slots: int | None
    """Requests that all engines behind the address run at once, together."""


class ServerInfo(NamedTuple):
    """Where an engine describes itself."""

    paths: tuple[str, ...]
    """The same page under the names of different versions, the newest first."""
    tokens: Callable[[Mapping[str, object]], int | None]
    """From the page, a JSON object, to `Description.tokens`."""
    slots: Callable[[Mapping[str, object]], int | None]
    """The same to `Description.slots`."""
    metrics_option: str
    """With which it is to be started so that it shows metrics."""
    at_most: bool = False
    """See `Description`."""


def _sglang(page: Mapping[str, object]) -> int | None:
    """The size is that of the first data-parallel rank alone (srt/managers/data_parallel_controller.py)."""
    return _product(page.get("max_total_num_tokens"), _number(page.get("dp_size")) or 1)


def _sglang_slots(page: Mapping[str, object]) -> int | None:
    """What was set may be null, or more than the memory allows; what holds is in the state of the first data-parallel
    rank (srt/managers/scheduler.py).
    """
    states = page.get("internal_states")
    state = states[0] if isinstance(states, list) and states else None
    holds = state.get("effective_max_running_requests_per_dp") if isinstance(state, dict) else None
    return _product(holds, _number(page.get("dp_size")) or 1)


def _llama_cpp_slots(page: Mapping[str, object]) -> int | None:
    return _number(page.get("total_slots"))


def _llama_cpp(page: Mapping[str, object]) -> int | None:
    """Slots times what each may hold. With one cache for all slots (`--kv-unified`, its default unless their number is
    said) each may hold all of it, and nothing on the page tells: too high then by the number of slots. It is taken all
    the same, as an upper bound: without it 2 million would be assumed, and too high costs far less than too low.
    """
    settings = page.get("default_generation_settings")
    return _product(page.get("total_slots"), settings.get("n_ctx") if isinstance(settings, dict) else None)


SERVER_INFO: Mapping[str, ServerInfo] = {
    # By the older name too in 0.5.23, which writes a warning to its log then (srt/entrypoints/http_server.py).
    "sglang": ServerInfo(("/server_info", "/get_server_info"), _sglang, _sglang_slots, "--enable-metrics"),
    "llamacpp": ServerInfo(("/props",), _llama_cpp, _llama_cpp_slots, "--metrics", at_most=True),
}
"""By the name that the settings use, and the engine's own model cards (`owned_by`)."""


def read_description(engine: str, page: bytes) -> Description | None:
    """What an engine of `SERVER_INFO` says of itself; None if that is nothing."""
    try:
        fields = orjson.loads(page)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    info = SERVER_INFO[engine]
    said = Description(info.tokens(fields), info.at_most, info.slots(fields))
    return None if said.tokens is None and said.slots is None else said


def owner(cards: Sequence[ModelCard]) -> str | None:
    """The engine that the first of a server's model cards names; None if it does not."""
    named = orjson.loads(cards[0].raw).get("owned_by") if cards else None
    return named if isinstance(named, str) else None


def _number(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= MOST_TOKENS else None


def _product(one: object, other: object) -> int | None:
    a, b = _number(one), _number(other)
    return None if a is None or b is None else _number(a * b)
