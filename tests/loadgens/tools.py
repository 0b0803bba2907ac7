# SPDX-License-Identifier: Apache-2.0
"""The load generators: how each is started, and where its summary says what.

Each runs as it installs, with options that its users have: which server and model, how many requests of which size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.loadgens.environment import HERE, TOKENIZER, VLLM, program

MODEL = "tiny"
REQUESTS, STREAMS = 40, 8
PROMPT, RESPONSE = 64, 32
"""Tokens."""
LOCUST_S = 25
SETTINGS = "settings.yaml"


@dataclass(frozen=True)
class Summary:
    """What a load generator reports of its run; None: nothing."""

    good: int
    failed: int
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    """Mean of the requests that succeeded; NaN if there is none."""
    duration_s: float
    """The same."""


@dataclass(frozen=True)
class Tool:
    """One load generator."""

    name: str
    package: str
    """Of which the version is told."""
    environment: str
    command: Callable[[str], list[str]]
    """For lbproxy's URL; run in a folder of its own."""
    read: Callable[[Path], Summary]
    """What it left in that folder."""
    settings: Callable[[str], str] | None = None
    """The content of its file SETTINGS."""
    cuts: bool = False
    """It closes what is in flight when the number of requests is reached, and does not count it."""
    environ: tuple[tuple[str, str], ...] = ()


def vllm_bench(url: str) -> list[str]:
    shape = ["--random-input-len", str(PROMPT), "--random-output-len", str(RESPONSE), "--ignore-eos"]
    load = ["--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS)]
    out = ["--save-result", "--result-dir", ".", "--result-filename", "out.json", "--percentile-metrics", "ttft,e2el"]
    what = ["--backend", "openai", "--base-url", url, "--model", MODEL, "--tokenizer", str(TOKENIZER)]
    return [str(program(VLLM, "vllm")), "bench", "serve", "--dataset-name", "random", *what, *shape, *load, *out]


def read_vllm_bench(folder: Path) -> Summary:
    out = json.loads((folder / "out.json").read_text())
    return Summary(
        out["completed"],
        out["failed"],
        out["total_input_tokens"],
        out["total_output_tokens"],
        out["mean_ttft_ms"] / 1000,
        out["mean_e2el_ms"] / 1000,
    )


def guidellm(url: str) -> list[str]:
    return [
        *(str(program("guidellm", "guidellm")), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL},request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={RESPONSE}"),
        *("--output", "kind=json,path=out.json"),
    ]


def read_guidellm(folder: Path) -> Summary:
    (run,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    metrics = run["metrics"]
    totals = metrics["request_totals"]
    good = totals["successful"]

    def of(name: str, what: str) -> float:
        value = metrics[name]["successful"][what]
        return math.nan if value is None else float(value)

    return Summary(
        good,
        totals["errored"],
        int(of("prompt_token_count", "total_sum")),
        int(of("output_token_count", "total_sum")),
        of("time_to_first_token_ms", "mean") / 1000,
        of("request_latency", "mean"),
    )


def inference_perf(url: str) -> list[str]:
    return [str(program("inference-perf", "inference-perf")), "--config_file", SETTINGS]


def inference_perf_settings(url: str) -> str:
    """Of YAML, JSON is a part."""
    size = {"std_dev": 0, "total_count": REQUESTS + 1}
    settings = {
        "load": {"type": "constant", "stages": [{"rate": 4, "duration": REQUESTS // 4}], "num_workers": 1},
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(TOKENIZER)},
        "data": {
            "type": "random",
            "input_distribution": {"min": PROMPT, "max": PROMPT, "mean": PROMPT, **size},
            "output_distribution": {"min": RESPONSE, "max": RESPONSE, "mean": RESPONSE, **size},
        },
        "report": {"request_lifecycle": {"summary": True, "per_stage": False, "per_request": False}},
        "storage": {"local_storage": {"path": "out"}},
    }
    return json.dumps(settings)


def read_inference_perf(folder: Path) -> Summary:
    out = json.loads((folder / "out" / "summary_lifecycle_metrics.json").read_text())
    good, times = out["successes"], out["successes"]["latency"]
    return Summary(
        good["count"],
        out["failures"]["count"],
        int(good["prompt_tokens"]["total"]),
        int(good["output_tokens"]["total"]),
        times["time_to_first_token"]["mean"],
        times["request_latency"]["mean"],
    )


def aiperf(url: str) -> list[str]:
    return [
        *(str(program("aiperf", "aiperf")), "profile", "--model", MODEL, "--url", url, "--ui", "none"),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(TOKENIZER)),
        *("--concurrency", str(STREAMS), "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", str(PROMPT), "--output-tokens-mean", str(RESPONSE)),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", "out"),
    ]


def read_aiperf(folder: Path) -> Summary:
    out = json.loads((folder / "out" / "profile_export_aiperf.json").read_text())

    def of(name: str) -> float:
        return float(out[name]["avg"]) if out.get(name) else 0.0

    return Summary(
        int(of("request_count")),
        int(of("error_request_count")),
        int(of("total_usage_prompt_tokens")),
        int(of("total_usage_completion_tokens")),
        of("time_to_first_token") / 1000,
        of("request_latency") / 1000,
    )


def evalscope(url: str) -> list[str]:
    return [
        *(str(program("evalscope", "evalscope")), "perf", "--model", MODEL, "--api", "openai", "--stream"),
        *("--url", f"{url}/v1/chat/completions", "--no-test-connection", "--tokenizer-path", str(TOKENIZER)),
        *("--dataset", "random", "--min-prompt-length", str(PROMPT), "--max-prompt-length", str(PROMPT)),
        *("--prefix-length", "0", "--max-tokens", str(RESPONSE), "--min-tokens", str(RESPONSE)),
        *("--number", str(REQUESTS), "--parallel", str(STREAMS), "--outputs-dir", "out"),
        *("--extra-args", '{"ignore_eos": true}'),
    ]


def read_evalscope(folder: Path) -> Summary:
    (path,) = folder.glob("out/**/benchmark_summary.json")
    out = json.loads(path.read_text())
    good = out["Success Requests"]
    return Summary(
        good,
        out["Failed Requests"],
        round(out["Avg Input Tokens"] * good),
        round(out["Avg Output Tokens"] * good),
        out["Avg TTFT (ms)"] / 1000,
        out["Avg Latency (s)"],
    )


def genai_bench(url: str) -> list[str]:
    return [
        *(str(program("genai-bench", "genai-bench")), "benchmark", "--api-backend", "vllm", "--api-base", url),
        *("--api-key", "none", "--task", "text-to-text", "--api-model-name", MODEL, "--model", MODEL),
        *("--model-tokenizer", str(TOKENIZER), "--server-engine", "vLLM", "--experiment-base-dir", "out"),
        *("--num-concurrency", str(STREAMS), "--max-requests-per-run", str(REQUESTS), "--max-time-per-run", "5"),
        *("--traffic-scenario", f"D({PROMPT},{RESPONSE})"),
    ]


def read_genai_bench(folder: Path) -> Summary:
    (path,) = folder.glob("out/*/D*.json")
    out = json.loads(path.read_text())["aggregated_metrics"]
    times = out["stats"]
    return Summary(
        out["num_completed_requests"],
        out["num_error_requests"],
        times["num_input_tokens"]["sum"],
        times["num_output_tokens"]["sum"],
        times["ttft"]["mean"],
        times["e2e_latency"]["mean"],
    )


def locust(url: str) -> list[str]:
    return [
        *(str(program("locust", "locust")), "--headless", "--host", url, "--json-file", "out"),
        *("--locustfile", str(HERE / "programs" / "locust_user.py"), "--exit-code-on-error", "0"),
        *("--users", str(STREAMS), "--spawn-rate", str(STREAMS)),
        *("--run-time", f"{LOCUST_S}s", "--stop-timeout", str(LOCUST_S)),
    ]


def read_locust(folder: Path) -> Summary:
    (out,) = json.loads((folder / "out.json").read_text())
    good = out["num_requests"] - out["num_failures"]
    return Summary(good, out["num_failures"], None, None, None, out["total_response_time"] / out["num_requests"] / 1000)


OFFLINE = (("HF_HUB_OFFLINE", "1"),)

TOOLS = (
    Tool("vllm bench serve", "vllm", VLLM, vllm_bench, read_vllm_bench, environ=OFFLINE),
    Tool("guidellm", "guidellm", "guidellm", guidellm, read_guidellm, environ=OFFLINE),
    Tool(
        *("inference-perf", "inference-perf", "inference-perf", inference_perf, read_inference_perf),
        settings=inference_perf_settings,
        environ=OFFLINE,
    ),
    Tool("aiperf", "aiperf", "aiperf", aiperf, read_aiperf),
    Tool("evalscope perf", "evalscope", "evalscope", evalscope, read_evalscope, environ=OFFLINE),
    Tool(
        *("genai-bench", "genai-bench", "genai-bench", genai_bench, read_genai_bench),
        cuts=True,
        environ=(*OFFLINE, ("ENABLE_UI", "false")),
    ),
    Tool("locust", "locust", "locust", locust, read_locust),
)
