# SPDX-License-Identifier: Apache-2.0
"""What each engine's page of metrics says of a load, engine by engine: pages of a few lines with the real names."""

from __future__ import annotations

from typing import NamedTuple

from lbproxy.config.parse import parse
from lbproxy.core.engines.dialects import Engines


class Load(NamedTuple):
    """What others have there."""

    waiting: int
    running: int
    kv: float


BUSY, FREE = Load(8, 20, 0.9), Load(0, 2, 0.1)

VLLM = """\
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} {waiting}
vllm:%s{{engine="0",model_name="m"}} {kv}
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="27000"}} 1.0
"""
SGLANG = """\
sglang:num_running_reqs{{model_name="m",tp_rank="0"}} {running}
sglang:num_queue_reqs{{model_name="m",tp_rank="0"}} {waiting}
sglang:token_usage{{model_name="m",tp_rank="0"}} {kv}
"""
BLOCKS = 'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="%s",model="m",version="1"}} '
PAGES = {
    "vllm": VLLM % "kv_cache_usage_perc",
    "vllm, old names": VLLM % "gpu_cache_usage_perc",
    "sglang": SGLANG + "sglang:page_size 16\nsglang:num_pages 27000\n",
    "sglang, old names": SGLANG + 'sglang:cache_config_info{{page_size="16",num_pages="27000"}} 1.0\n',
    "trtllm-serve": """\
trtllm_num_requests_waiting{{engine_type="trtllm",model_name="m"}} {waiting}
trtllm_num_requests_running{{engine_type="trtllm",model_name="m"}} {running}
trtllm_kv_cache_utilization{{engine_type="trtllm",model_name="m"}} {kv}
trtllm_kv_cache_tokens_per_block{{engine_type="trtllm",model_name="m"}} 32
trtllm_kv_cache_max_blocks{{engine_type="trtllm",model_name="m"}} 13500
""",
    "triton-tensorrt-llm": f"""\
nv_trt_llm_request_metrics{{{{model="m",request_type="waiting",version="1"}}}} {{waiting}}
nv_trt_llm_request_metrics{{{{model="m",request_type="scheduled",version="1"}}}} {{running}}
nv_trt_llm_request_metrics{{{{model="m",request_type="max",version="1"}}}} 512
{BLOCKS % "fraction"}{{kv}}
{BLOCKS % "tokens_per"}64
{BLOCKS % "max"}6750
""",
    "lmdeploy": """\
lmdeploy:num_requests_running{{engine="0",model_name="m"}} {running}
lmdeploy:num_requests_waiting{{engine="0",model_name="m"}} {waiting}
lmdeploy:gpu_cache_usage_perc{{engine="0",model_name="m"}} {kv}
""",
    "llamacpp": "llamacpp:requests_processing {running}\nllamacpp:requests_deferred {waiting}\n",
    "mine": 'jobs{{state="queued"}} {waiting}\njobs{{state="active"}} {running}\nused {kv}\nall 1\n',
}
OWN = "{mine: {queued: 'jobs{state=queued}', running: 'jobs{state=active}', kv_utilization: {used: used, max: all}}}"
ENGINES = Engines(parse(f"endpoints: ['http://a']\nengines: {OWN}", environ={}).engines)


def page_of(dialect: str, load: Load) -> bytes:
    """The page of a server of that dialect under that load."""
    return PAGES[dialect].format(**load._asdict()).encode()
