# SPDX-License-Identifier: Apache-2.0
"""What an engine states of itself outside its metrics: the size of its KV cache, and how many requests it runs at once.

SGLang and llama.cpp expose metrics only if they are started with an option, but always describe themselves. This module
has the paths and the fields of these pages; the prober requests them. The pages are not trusted: a value that is not a
plain number within the limits is unknown, and nothing is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import orjson

from lbproxy.core.engines.handover import BOOTSTRAP_PORT, Handover, Role
from lbproxy.core.requests.openai import ModelCard
from lbproxy.core.requests.outline import is_light

MAX_CACHE_TOKENS = 1_000_000_000
"""As for `kv_cache_tokens` in the settings: a larger value is not a size, but an error."""
STATE_PATH: Final = "/is_sleeping"


class Description(NamedTuple):
    """What a page states. None: not stated."""

    tokens: int | None
    """The total size of all KV caches behind the address, in tokens."""
    is_upper_bound: bool
    """`tokens` is an upper bound."""
    slots: int | None
    """How many requests all engines behind the address run at once, in total."""
    handover: Handover | None = None
    """Its part where prefill and decode are apart."""
    prompt_tokens: int | None = None
    """The longest prompt that it takes."""


class ServerInfo(NamedTuple):
    """Where an engine describes itself."""

    paths: tuple[str, ...]
    """The path of the page in different versions, the newest first."""
    tokens: Callable[[Mapping[str, object]], int | None]
    """From the page, a JSON object, to `Description.tokens`."""
    slots: Callable[[Mapping[str, object]], int | None]
    """From the page to `Description.slots`."""
    metrics_option: str
    """The option with which the engine exposes metrics."""
    is_upper_bound: bool = False
    """See `Description`."""
    handover: Callable[[Mapping[str, object]], Handover | None] = lambda _: None
    """From the page to `Description.handover`."""
    prompt_tokens: Callable[[Mapping[str, object]], int | None] = lambda _: None
    """From the page to `Description.prompt_tokens`."""


def _sglang(page: Mapping[str, object]) -> int | None:
    """The size is that of the first data-parallel rank alone (srt/managers/data_parallel_controller.py)."""
    return _product(page.get("max_total_num_tokens"), read_number(page.get("dp_size")) or 1)


def _sglang_slots(page: Mapping[str, object]) -> int | None:
    """The configured number may be null, or more than the memory allows. The number in effect is in the state of the
    first data-parallel rank (srt/managers/scheduler.py).
    """
    states = page.get("internal_states")
    state = states[0] if isinstance(states, list) and states else None
    holds = state.get("effective_max_running_requests_per_dp") if isinstance(state, dict) else None
    return _product(holds, read_number(page.get("dp_size")) or 1)


def _sglang_handover(page: Mapping[str, object]) -> Handover | None:
    """Its mode is null where it serves whole requests, and only those."""
    mode, port = page.get("disaggregation_mode", 0), page.get("disaggregation_bootstrap_port")
    if mode is None or mode == "null":
        return Handover()
    if not isinstance(mode, str) or mode not in {"prefill", "decode"}:
        return None
    is_port = isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536
    return Handover(Role(mode), "sglang", port if is_port and isinstance(port, int) else BOOTSTRAP_PORT)


def connector_of(page: bytes) -> str | None:
    """The connector that the names on a vLLM metrics page show; None: none that can be recognised. Its families are
    there from the start.
    """
    return next((name for name in ("nixl", "mooncake") if b"\nvllm:%b_" % name.encode() in page), None)


def _llama_cpp_slots(page: Mapping[str, object]) -> int | None:
    return read_number(page.get("total_slots"))


def _llama_cpp(page: Mapping[str, object]) -> int | None:
    """Slots times the context of each. With one cache for all slots (`--kv-unified`, the default unless their number is
    given) each may use all of it, and the page does not show that: then the result is too high by the number of slots.
    It is used all the same, as an upper bound: without it 2 million would be assumed, and too high costs far less than
    too low.
    """
    return _product(page.get("total_slots"), _llama_cpp_context(page))


def _llama_cpp_context(page: Mapping[str, object]) -> int | None:
    settings = page.get("default_generation_settings")
    return read_number(settings.get("n_ctx")) if isinstance(settings, dict) else None


SERVER_INFO: Mapping[str, ServerInfo] = {
    # Also under the older path in 0.5.23, which logs a warning then (srt/entrypoints/http_server.py).
    "sglang": ServerInfo(
        ("/server_info", "/get_server_info"), _sglang, _sglang_slots, "--enable-metrics", handover=_sglang_handover
    ),
    "llamacpp": ServerInfo(
        ("/props",),
        _llama_cpp,
        _llama_cpp_slots,
        "--metrics",
        is_upper_bound=True,
        prompt_tokens=_llama_cpp_context,
    ),
}
"""By the name in the settings and in the engine's own model cards (`owned_by`)."""


def read_description(engine: str, page: bytes) -> Description | None:
    """Read what an engine of `SERVER_INFO` states of itself; None if that is nothing."""
    if not is_light(page):
        return None
    try:
        fields = orjson.loads(page)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    info = SERVER_INFO[engine]
    rest = info.slots(fields), info.handover(fields), info.prompt_tokens(fields)
    description = Description(info.tokens(fields), info.is_upper_bound, *rest)
    return None if description == Description(None, info.is_upper_bound, None) else description


def engine_of(cards: Sequence[ModelCard]) -> str | None:
    """The engine that the first model card of a server names; None if it names none."""
    named = orjson.loads(cards[0].raw).get("owned_by") if cards else None
    return named if isinstance(named, str) else None


def read_number(value: object) -> int | None:
    """A number of tokens or requests; None: something else."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= MAX_CACHE_TOKENS else None


def _product(one: object, other: object) -> int | None:
    a, b = read_number(one), read_number(other)
    return None if a is None or b is None else read_number(a * b)


def read_state(status: int, body: bytes) -> bool | None:
    """What an engine reports of its sleep mode. Pure.

    The contract is vLLM's (docs/decisions/0045): `GET /is_sleeping` returns `{"is_sleeping": bool}`. An endpoint whose
    engine does not say so in this form is taken to be awake.

    Whether an engine sleeps, by its response to `STATE_PATH`. None: it cannot say.
    """
    if status != 200:
        return None
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    said = value.get("is_sleeping") if isinstance(value, dict) else None
    return said if isinstance(said, bool) else None


def is_silent(status: int) -> bool:
    """Whether a response says nothing about the engine, now: it may another time. Others refuse for good."""
    return (status >= 500 and status != 501) or status in {408, 429}
