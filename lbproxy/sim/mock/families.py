# SPDX-License-Identifier: Apache-2.0
"""What the metrics page has of KV that goes from server to server.

With vLLM's NIXL connector: `vllm:nixl_*` (with Mooncake's `vllm:mooncake_*`), from the start, and
`vllm:num_requests_kv_fetch_by_stage` unless the server is for prefill only; that is how role and connector are
recognised. With SGLang, whose page is this and no more: the load, with the server's role in `engine_type`, and the
queues of disaggregation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lbproxy.sim.engine.engine import EngineGauges
from lbproxy.sim.engine.presets import BLOCK_TOKENS
from lbproxy.sim.mock.exposition import Labels, family, head, sample

BLOCK_BYTES = BLOCK_TOKENS * 131_072
"""Bytes of the KV of one block: 128 KB a token, as of an 8B model."""

_HISTOGRAMS = {
    "xfer_time_seconds": "Duration of transfers",
    "post_time_seconds": "Time to submit transfers",
    "bytes_transferred": "Bytes of transfers",
    "num_descriptors": "Descriptors of transfers",
}
_COUNTERS = {
    "nixl": {
        "num_failed_transfers": "Transfers that failed",
        "num_failed_notifications": "Notifications that failed",
        "num_kv_expired_reqs": "Requests whose lease ended before they were read",
    },
    "mooncake": {
        "num_failed_transfers": "Transfers that failed",
        "num_failed_recvs": "Requests whose KV was not received",
        "num_kv_expired_reqs": "Requests whose KV nobody read in time",
    },
}


def external_cache(model: str, ranks: Sequence[EngineGauges]) -> bytes:
    """Of every vLLM: what came from elsewhere."""
    each = [({"engine": str(number), "model_name": model}, gauges) for number, gauges in enumerate(ranks)]
    lines: list[str] = []
    for stem, about in (("queries", "looked up elsewhere"), ("hits", "that came from elsewhere")):
        name = f"external_prefix_cache_{stem}_total"
        lines += family(name, "counter", f"Prompt tokens {about}.", [(n, g.received_tokens) for n, g in each])
    return "".join(lines).encode()


def vllm(
    model: str, connector: str, role: str, ranks: Sequence[EngineGauges], *, transfer_ms: float, token_ms: float
) -> bytes:
    """Those of a vLLM with NIXL or Mooncake. A transfer takes `transfer_ms`, and `token_ms` for each token."""
    each = [({"engine": str(number), "model_name": model}, gauges) for number, gauges in enumerate(ranks)]
    lines: list[str] = []
    if role != "prefill":
        stages = [
            ({**name, "stage": stage}, value)
            for name, gauges in each
            for stage, value in (("waiting_to_start", 0), ("in_progress", gauges.deferred))
        ]
        lines += family("num_requests_kv_fetch_by_stage", "gauge", "Requests by the stage of their transfer.", stages)
    for stem, about in _HISTOGRAMS.items():
        full = f"vllm:{connector}_{stem}"
        lines += head(full, "histogram", f"{about}.")
        for name, gauges in each:
            blocks = gauges.received_tokens // BLOCK_TOKENS
            total = {
                "xfer_time_seconds": (gauges.transfers * transfer_ms + gauges.received_tokens * token_ms) / 1e3,
                "bytes_transferred": blocks * BLOCK_BYTES,
                "num_descriptors": blocks,
            }.get(stem, 0.0)
            lines.append(sample(f"{full}_bucket", {**name, "le": "+Inf"}, gauges.transfers))
            lines.append(sample(f"{full}_count", name, gauges.transfers))
            lines.append(sample(f"{full}_sum", name, total))
    for stem, about in _COUNTERS[connector].items():
        counts = [
            (
                n,
                {
                    "num_failed_transfers": g.failed_transfers,
                    "num_failed_recvs": g.failed_transfers,
                    "num_kv_expired_reqs": g.expired_holds,
                }.get(stem, 0),
            )
            for n, g in each
        ]
        lines += family(f"{connector}_{stem}_total", "counter", f"{about}.", counts)
    return "".join(lines).encode()


def sglang(model: str, role: str, gauges: EngineGauges, kv_tokens: int, queues: Mapping[str, int]) -> bytes:
    """The page of SGLang. `queues`: the names of families, without what all names begin with, and their values."""
    who: Labels = {
        "engine_type": "unified" if role == "both" else role,
        "model_name": model,
        "tp_rank": "0",
        "pp_rank": "0",
        "moe_ep_rank": "0",
    }
    figures: dict[str, float] = {
        "num_running_reqs": gauges.running,
        "num_queue_reqs": gauges.waiting - gauges.deferred,
        "num_used_tokens": gauges.kv_usage * kv_tokens,
        "token_usage": gauges.kv_usage,
        "max_total_num_tokens": kv_tokens,
        "num_prefill_bootstrap_queue_reqs": 0,
        "num_prefill_inflight_queue_reqs": 0,
        "num_decode_prealloc_queue_reqs": 0,
        "num_decode_transfer_queue_reqs": 0,
        "num_decode_host_receive_queue_reqs": 0,
        "num_bootstrap_failed_reqs_total": 0,
        "num_transfer_failed_reqs_total": 0,
        **queues,
    }
    lines: list[str] = []
    for stem, value in figures.items():
        kind = "counter" if stem.endswith("_total") else "gauge"
        lines += [*head(f"sglang:{stem}", kind, f"SGLang's {stem}."), sample(f"sglang:{stem}", who, value)]
    return "".join(lines).encode()
