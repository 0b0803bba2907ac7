# SPDX-License-Identifier: Apache-2.0
"""What arrives at a balancer: a job as its proxy would read it, with what is random about that."""

from __future__ import annotations

import random

from lbproxy.core.queue.flow import ANONYMOUS
from lbproxy.core.requests.request import InferenceRequest
from lbproxy.sim.engine.engine import SimRequest
from lbproxy.sim.fleet.fleet import BASE_MODEL, TOKEN_BYTES, FleetOptions
from lbproxy.sim.workloads.prompts import block_hashes, routing_keys
from lbproxy.sim.workloads.workload import Job


def read_job(
    job: Job, options: FleetOptions, rng: random.Random, *, now: float
) -> tuple[InferenceRequest, SimRequest, bool]:
    """What a balancer is told of a job, what a server is to compute, and whether the response is streamed. `rng` is the
    job's own.
    """
    streamed = rng.random() < (options.stream_share if job.stream_share is None else job.stream_share)
    prompt_tokens = job.prompt_tokens
    hashes = block_hashes((*job.prompt, job.answer), job.model)
    prompt_bytes = round(prompt_tokens * TOKEN_BYTES * (1 + rng.uniform(-options.size_error, options.size_error)))
    flow, rules, priority = job.flow if options.fair else ANONYMOUS, options.flow_rules, job.priority or 0
    request = InferenceRequest(
        id=job.id,
        model=job.model or BASE_MODEL,
        stream=streamed,
        body_bytes=prompt_bytes,
        prompt_bytes=prompt_bytes,
        block_keys=routing_keys(hashes, prompt_tokens, options.block_tokens) if options.block_tokens else (),
        session=job.session,
        priority=priority if rules is None else rules.priority_of(flow, job.priority, None),
        flow=flow,
        deadline=None if job.slo_ttft_s is None else now + job.slo_ttft_s,
        splittable=True,
    )
    return request, SimRequest(job.id, prompt_tokens, job.answer.tokens, hashes, job.model), streamed
