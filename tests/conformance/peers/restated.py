# SPDX-License-Identifier: Apache-2.0
"""Where a case comes from: the other router, its file at a commit, and the tests there. None of their code is here.

Their suites do not run against another router: those in Rust call their own router in the same process, those in
Python replace its parts by mocks or start its command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tests.support.docs import table

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True)
class Source:
    """A file of another router's repository."""

    repository: str
    commit: str
    path: str

    def __str__(self) -> str:
        return f"{self.repository} `{self.path}` ({self.commit[:7]})"


@dataclass(frozen=True)
class Case:
    """One promise, and what lbproxy does about it."""

    source: Source
    names: tuple[str, ...]
    """Of the tests there."""
    promise: str
    differs: str
    """What lbproxy does instead, and why; empty if it does the same."""


ROUTER, STACK, SMG = "vllm-project/router", "vllm-project/production-stack", "lightseekorg/smg"
GATEWAY = "sgl-project/sglang"
CANCEL = Source(
    GATEWAY, "03744dbedc69f4db84d0a6ae6d4400ce252bb6d8", "sgl-model-gateway/tests/reliability/upstream_cancel_test.rs"
)
GAUGE = Source(
    GATEWAY, "4dfda317fd6220541246f55da639a562a68fb9b3", "sgl-model-gateway/tests/http_connections_gauge_test.rs"
)
BREAKER = Source(
    SMG, "0a1487d45557d3f47ac76f2ceb459a226c976ab3", "model_gateway/tests/reliability/circuit_breaker_test.rs"
)
TRANSPARENT = Source(ROUTER, "e0c942d4492332113a920c233cc71f20adbfdf6e", "tests/test_transparent_proxy_routing.rs")
QUEUE = Source(ROUTER, "520303f1052ea01285e1906ea1c68d01b31a902d", "tests/queue_timeout_http_test.rs")
SPEECH = Source(STACK, "0c0e3e755b8c59281efe65222e816d5653a6be15", "src/tests/test_transcription_streaming.py")
MANY_KEYS = Source(STACK, "83939c1a4a2412211cb944ff60c97566e92a81d1", "src/tests/test_multi_api_key_auth.py")
PROVIDERS = Source(
    STACK, "39aea0955cb549d1dbbe53453f4e4168fb25d5ca", "src/tests/external_providers/test_response_headers.py"
)
TIMEOUTS = Source(STACK, "1405abc7d38ee4a6f1027207cd4b79cfce9765fb", "src/tests/test_request_timeouts.py")
ENDPOINTS = Source(ROUTER, "0803ed393001c160fe7fa5efc10d0e6778b97fdb", "tests/api_endpoints_test.rs")
EDGES = Source(ROUTER, "6dddfdcce4b52d4de428b1063c5fb3aa79ec473e", "tests/routing_edge_cases_test.rs")
LIMITS = Source(ROUTER, "15fa0fcb84d8741c70077bb67df4458c04d960b2", "py_test/integration/test_rate_limiting.py")
CACHE = Source(
    ROUTER, "e643a22618894f88f85e011fb12abc99a32012d9", "py_test/integration/load_balancing/test_cache_aware.py"
)
RETRIES = Source(SMG, "f98283f32128d5dc26939127303acf71a557164f", "model_gateway/tests/reliability/retries_test.rs")
FAULTS = Source(
    SMG, "9e686a71a71479187b6f078c70c0cca470f0b80a", "model_gateway/tests/reliability/fault_tolerance_test.rs"
)
SMG_LIMITS = Source(
    SMG, "f98283f32128d5dc26939127303acf71a557164f", "model_gateway/tests/reliability/rate_limiting_test.rs"
)
IDS = Source(SMG, "f98283f32128d5dc26939127303acf71a557164f", "model_gateway/tests/routing/header_forwarding_test.rs")
KEYS = Source(SMG, "24634ae984317e6f5af720d5d1c273cd7e9a7223", "model_gateway/tests/security/auth_test.rs")
STREAMS = Source(SMG, "24634ae984317e6f5af720d5d1c273cd7e9a7223", "model_gateway/tests/api/streaming_tests.rs")
LEAVING = Source(STACK, "7ae2a36aed55a8312bade6bbccbe607fa658cf94", "src/tests/test_client_disconnect.py")
FAILOVER = Source(STACK, "0812146ca7cf33de5c42c362785c192a24a55622", "src/tests/test_instance_failover.py")
BUFFERING = Source(STACK, "a9b591063cd651128915f1bbe24424e3a1d98cbd", "src/tests/test_response_buffering.py")
VALIDATION = Source(STACK, "5bad37be306baee9188bad0650b239108a79bd46", "src/tests/test_request_validation.py")
HEADERS = Source(STACK, "2c379dea14579e5d117a2535125ab3d31d55abee", "src/tests/test_request_auth_headers.py")
ALIASES = Source(STACK, "1c34c148279de7bf823a27db3eeb3f3d258c3c42", "src/tests/test_alias_routing.py")
FORMS = Source(STACK, "1c22ef3019107c9a698db4c45db23f7e41b0891f", "src/tests/test_multipart_proxy.py")

CASES: list[Case] = []
"""All that the tests of this folder restate, once they are imported."""


def restates(source: Source, *names: str, differs: str = "") -> Callable[[Test], Test]:
    """Marks a test; its docstring's first line says what is promised. `differs`: what lbproxy does instead, and why,
    which is then what the test asserts.
    """

    def mark(test: Test) -> Test:
        promise = (test.__doc__ or "").strip().partition("\n\n")[0]
        CASES.append(Case(source, names, " ".join(promise.split()), differs))
        return test

    return mark


def restated() -> str:
    """The table of how many of their tests lbproxy is held to, by router."""
    rows = []
    for repository in sorted({one.source.repository for one in CASES}):
        cases = [one for one in CASES if one.source.repository == repository]
        names, other = (sum(len(one.names) for one in cases if bool(one.differs) == so) for so in (False, True))
        not_here = sum(len(one) for source, one, _ in NOT_HERE if source.repository == repository)
        rows.append([repository, *map(str, (names, other, not_here))])
    return table(["router", "passes", "differs", "does not apply"], rows)


def differing() -> str:
    """The table of what lbproxy does otherwise, on purpose."""
    return table(["they promise", "lbproxy"], sorted([one.promise, one.differs] for one in CASES if one.differs))


NOT_HERE: tuple[tuple[Source, tuple[str, ...], str], ...] = (
    (
        ENDPOINTS,
        ("worker_management_tests", "test_flush_cache", "test_get_loads"),
        "lbproxy changes its endpoints by its settings, discovery or its admin port; caches are the model server's",
    ),
    (
        ENDPOINTS,
        ("test_get_server_info", "test_get_model_info", "test_health_generate_endpoint"),
        "with different servers there is no server to describe; `GET /v1/models` lists the models of all",
    ),
    (
        ENDPOINTS,
        ("test_missing_required_fields", "test_rerank_invalid_request"),
        "lbproxy checks no field but `model`: the model server knows what it accepts, and its response is relayed",
    ),
    (
        ENDPOINTS,
        ("test_program_*", "test_v1_responses_program_request_is_tracked"),
        "program scheduling is a feature of that router",
    ),
    (
        ENDPOINTS,
        ("test_pd_mode_routing",),
        "prefill and decode on different servers: tests/proxy/exchange/test_split_requests.py and tests/real",
    ),
    (
        EDGES,
        ("cache_aware_cases_*", "stale_tenant_*", "round_robin_tenants_*", "session_header_*"),
        "they call that router's tree and policies, not a port",
    ),
    (
        CACHE,
        ("thresholds of test_cache_aware_diverse_prompts_balances",),
        "lbproxy has no thresholds: a predicted cost decides; the promise itself is restated",
    ),
    (
        TRANSPARENT,
        ("test_session_id_*", "test_sticky_routing_*", "test_header_session_id_*", "test_without_headers_*"),
        "a conversation stays together by what its prompts have in common, not by a header that names it",
    ),
    (
        TRANSPARENT,
        ("test_availability_filter_*", "test_inline_header_conversion_*", "test_pd_mode_*"),
        "they call that router's policy, not a port",
    ),
    (MANY_KEYS, ("test_parse_*", "test_get_allowed_api_keys_*"), "keys are in lbproxy's settings, by name"),
    (TIMEOUTS, ("TestResolveTimeoutSeconds",), "time limits are in lbproxy's settings, not in the environment"),
    (IDS, ("test_custom_request_id_headers",), "lbproxy has no setting for other names of the request's id"),
    (KEYS, ("mtls_tests",), "it sets no certificates; tests/proxy/front/test_https.py does"),
    (STREAMS, ("test_sse_format_parsing",), "it tests its own helper; `python -m tests.fuzz events` tests ours"),
    (
        ALIASES,
        ("test_alias_injects_reasoning_effort", "test_reasoning_effort_*", "test_client_reasoning_effort_*"),
        "an alias of lbproxy changes the model and nothing else of a request",
    ),
    (
        FAILOVER,
        ("test_initialize_*", "test_dynamic_config_*", "test_reconfigure_*"),
        "they read that router's settings",
    ),
    (LEAVING, ("test_cancel_and_wait_*",), "they test a helper inside of that router"),
    (BUFFERING, ("test_post_request_callback_*",), "lbproxy has no callbacks in Python"),
    (VALIDATION, ("test_transcription_rejects_non_numeric_temperature",), "fields are the model server's to check"),
)
"""What does not apply, and why."""
