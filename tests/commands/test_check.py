# SPDX-License-Identifier: Apache-2.0
"""`lbproxy check` shows what each endpoint is, what it shows of its load, what is missing and what that costs."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from lbproxy import __version__
from lbproxy.commands.check import ASKED, COSTS, NO_LOAD, NOT_ASKED, _keyless, check
from lbproxy.config.parse import parse
from lbproxy.core.engines.dialects import SIGNALS
from lbproxy.core.engines.readings import MAX_LORA
from lbproxy.extras.installing import needs
from lbproxy.extras.redis_store import RedisStore
from tests.control.rig import model_list, page
from tests.support.aio import run
from tests.support.certificates import CA, FOLDER
from tests.support.endpoint import NOT_FOUND, OK, Script, ScriptedEndpoint, answer
from tests.support.ports import free_port
from tests.support.process import LBPROXY
from tests.support.redis_server import needs_redis, redis_server

FIXTURES = Path(__file__).parent.parent / "fixtures" / "metrics"


def checked(
    scripts: dict[str, Script],
    more: str = "",
    engines: str = "{}",
    width: int = 200,
    settings: str = "",
) -> tuple[int, str]:
    """Exit code and output of checking one server and one that is not there."""
    console = Console(width=width, record=True, quiet=False, file=None, highlight=False, force_terminal=False)

    async def main() -> int:
        async with ScriptedEndpoint(scripts) as server:
            async with ScriptedEndpoint() as gone:  # while the other is there: a port that is free may come again
                pass
            text = (
                f"endpoints: [{{url: '{server.url}', name: gpu-1{more}}}, '{gone.url}']\nengines: {engines}\n{settings}"
            )
            return await check(parse(text, environ={}), console)

    code = run(main())
    return code, "\n".join(line.rstrip() for line in console.export_text().splitlines())


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("", 0),
        ("flows: {header: false, named: {nobody: {weight: 2}}}", 1),
        ("replicas: {url: 'redis://127.0.0.1:1/0', name: me}", 1),
        ("GONE", 1),
    ],
)
def test_strict_is_for_pipelines_that_want_all_of_it(more: str, code: int) -> None:
    """Without it one server that answers is enough, as a fleet is rarely complete."""
    console = Console(record=True, file=io.StringIO(), width=200)

    async def main(*, strict: bool) -> int:
        async with ScriptedEndpoint({"/health": OK, "/v1/models": model_list("m"), "/metrics": NOT_FOUND}) as server:
            gone = f", 'http://127.0.0.1:{free_port()}'" if more == "GONE" else ""
            text = f"endpoints: ['{server.url}'{gone}]\n{'' if gone else more}"
            return await check(parse(text, environ={}), console, strict=strict)

    assert (run(main(strict=False)), run(main(strict=True))) == (0, code), console.export_text()


def test_a_flow_that_no_key_has_is_warned_of() -> None:
    """`bobb`: whoever misspells a name believes that a limit holds."""
    keys = "auth: {keys: [{name: bob, key: 0123456789abcdef}]}\n"
    flows = "flows: {named: {bob: {weight: 2}, bobb: {in_flight: 1}}"
    output = checked({}, settings=f"{keys}{flows}}}")[1]
    assert "flows.named.bobb: no API key has this name" in output
    assert "flows.named.bob:" not in output
    assert "no API key has" not in checked({}, settings=f"{keys}{flows}, header: true}}")[1], "clients may say bobb"
    assert "no API key has" not in checked({}, settings=f"{flows}}}")[1], "without keys clients say it"
    alone = "flows: {header: false, named: {anonymous: {in_flight: 1}, bob: {in_flight: 1}}}"
    output = checked({}, settings=alone)[1]
    assert "flows.named.bob: no" in output
    assert "anonymous" not in output


def test_what_is_piped_has_a_line_for_each_fact_and_ends_as_if_it_was_read(tmp_path: Path) -> None:
    """`check | head -3` in a script with pipefail must not say that no endpoint can be used."""
    file = tmp_path / "cfg.yaml"
    url = f"http://127.0.0.1:{free_port()}"
    endpoints = [f"{{url: '{url}/{'x' * 90}{n}', name: e{n}, health: null}}" for n in range(200)]
    file.write_text(f"endpoints: [{', '.join(endpoints)}]\n")
    command = [*LBPROXY, "check", "--config", str(file)]
    whole = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert [line for line in whole.stdout.splitlines() if line.endswith(" ")] == []
    assert sum(line.startswith("  reachable  no; ") for line in whole.stdout.splitlines()) == 200
    piped = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert piped.stdout is not None
    piped.stdout.close()
    error = piped.communicate(timeout=120)[1]
    assert (piped.returncode, error) == (whole.returncode, "")


def test_a_good_server() -> None:
    code, output = checked(
        {
            "/health": OK,
            "/v1/models": model_list("base", "sql", parent="base"),
            "/metrics": page((FIXTURES / "vllm-0.32.0-load-lora-t0.prom").read_bytes()),
        }
    )
    assert code == 0
    for line in (
        *("  usable     yes", "  reachable  yes; health: GET /health returned 200", "  models     base"),
        *("  adapters   sql (of base)", "1 of 2 endpoints can be used."),
        "  load       5 of 5 signals: waiting 14, running 8, kv_utilization 0.81, block_size_tokens 32, kv_blocks 100",
    ):
        assert line in output
    assert "  engine     vllm (detected, metrics at http://127.0.0.1:" in output
    assert "missing" not in output
    assert "reachable  no; health:" in output


def test_settings_without_endpoints_wait_for_some_that_register() -> None:
    console = Console(width=200, record=True, file=None, highlight=False, force_terminal=False)
    assert run(check(parse("endpoints: []", environ={}), console)) == 0
    assert "There are no endpoints until some register" in console.export_text()


def test_what_is_missing_and_what_that_costs() -> None:
    lora = b'vllm:lora_requests_info{max_lora="?",running_lora_adapters="a"} 1\n'
    code, output = checked({"/health": OK, "/metrics": page(b"vllm:num_requests_running 1234567\n" + lora)})
    assert code == 0
    assert "  load       1 of 5 signals: running 1,234,567, adapters in use: a (room for an unknown number)" in output
    for name in (*SIGNALS, MAX_LORA):
        assert (f"  missing    {name}: {COSTS[name]}" in output) is (name != "running")


def test_where_it_looked_for_metrics() -> None:
    """The engine that the settings name decides, and the page's place is shown."""
    _, output = checked(
        {"/health": OK, "/load": page(b"q 3\n")}, ", engine: mine", "{mine: {queued: q, metrics_path: /load}}"
    )
    assert "  engine     mine (from the settings, metrics at http://127.0.0.1:" in output
    assert "/load)\n" in output
    assert "  load       1 of 1 signals: waiting 3" in output


def test_no_metrics() -> None:
    _, output = checked({"/health": OK, "/metrics": NOT_FOUND})
    assert "  engine     not detected" in output
    assert "  problem    load unknown: 127.0.0.1:" in output
    assert f"  missing    all of its load: {NO_LOAD}" in output
    _, output = checked({"/health": OK}, ", metrics: null")
    assert "  engine     not scraped" in output


def test_the_size_of_a_cache_that_the_server_says() -> None:
    """Of SGLang and llama.cpp without metrics: what routing will use in place of a guess."""
    scripts: dict[str, Script] = {"/health": OK, "/server_info": answer(b'{"max_total_num_tokens":64000}')}
    _, output = checked(scripts, ", engine: sglang")
    assert "  KV cache   64,000 tokens, as it reports" in output
    scripts = {"/props": answer(b'{"total_slots":4,"default_generation_settings":{"n_ctx":8192}}')}
    _, output = checked(scripts, ", engine: llamacpp")
    assert "  KV cache   32,768 tokens at most, as it reports" in output
    assert "  slots      4 requests at a time, as it reports" in output


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("vllm-0.32.0-load-lora-t0", "", "3,200 tokens, kv_blocks of block_size_tokens each"),
        ("vllm-0.33.0-hybrid-load", "", "4,738 tokens, as its metrics state, and not the 28,800 of its blocks"),
        ("documented/vllm-dp2-hybrid", "", "409,600 tokens, as its metrics state, and not the 36,000 of its blocks"),
        ("documented/vllm-dp2-hybrid", ", kv_cache_tokens: 5000", "5,000 tokens, by the settings"),
        ("rendered/sglang-0.5.23-hybrid", "", "200,000 tokens, kv_blocks of block_size_tokens each"),
    ],
)
def test_which_size_of_the_cache_counts_and_why(name: str, more: str, said: str) -> None:
    """On a hybrid model blocks times their size is another number than what fits."""
    metrics = (FIXTURES / f"{name}.prom").read_bytes()
    _, output = checked({"/health": OK, "/metrics": page(metrics)}, more)
    assert f"  KV cache   {said}" in " ".join(output.split("\n"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "rendered/sglang-0.5.23-hybrid",
            ["kv_utilization by sglang:kv_used_tokens / sglang:max_total_num_tokens", "sglang:token_usage", "0.95"],
        ),
        (
            "vllm-0.32.0-load-lora-t0",
            ["waiting by vllm:num_requests_waiting_by_reason{reason=capacity}", "vllm:num_requests_waiting", "16"],
        ),
        ("sglang-0.5.23-load", []),  # they differ by rounding
    ],
)
def test_of_metrics_that_differ_it_says_which_one_counts(name: str, parts: list[str]) -> None:
    metrics = (FIXTURES / f"{name}.prom").read_bytes()
    _, output = checked({"/health": OK, "/metrics": page(metrics)})
    text = " ".join(output.split("\n"))
    if parts:
        assert "  read       {}, and not by {}, which is {}".format(*parts) in text
    else:
        assert "  read " not in text


def test_who_could_show_metrics_is_told_how() -> None:
    models = answer(b'{"object":"list","data":[{"id":"m","owned_by":"sglang"}]}')
    _, output = checked({"/health": OK, "/v1/models": models, "/metrics": NOT_FOUND})
    assert "  engine     sglang (by its models)" in output
    assert f"all of its load: {NO_LOAD}; sglang exports it if it is started with --enable-metrics" in output


def test_how_long_a_request_may_be_is_shown_where_it_is_known() -> None:
    cards = [{"id": "a", "max_model_len": 8192}, {"id": "b", "max_model_len": 32768}, {"id": "c"}]
    models = answer(json.dumps({"object": "list", "data": cards[:1]}).encode())
    _, output = checked({"/health": OK, "/v1/models": models, "/metrics": NOT_FOUND})
    assert "  context    8,192 tokens of prompt and response\n" in output
    models = answer(json.dumps({"object": "list", "data": cards}).encode())
    _, output = checked({"/health": OK, "/v1/models": models, "/metrics": NOT_FOUND})
    assert "  context    8,192 tokens of prompt and response: a\n" in output
    assert "  context    32,768 tokens of prompt and response: b\n" in output
    models = answer(b'{"object":"list","data":[{"id":"m","owned_by":"llamacpp"}]}')
    props = answer(b'{"total_slots":2,"default_generation_settings":{"n_ctx":4096}}')
    _, output = checked({"/health": OK, "/v1/models": models, "/props": props, "/metrics": NOT_FOUND})
    assert "  context    4,096 tokens of prompt\n" in output


def test_ollama_is_recognised_by_its_api() -> None:
    models = answer(b'{"object":"list","data":[{"id":"m","owned_by":"library"}]}')
    version = answer(b'{"version":"0.14.0"}')
    _, output = checked({"/v1/models": models, "/metrics": NOT_FOUND, "/api/version": version})
    assert "  engine     ollama (by its API)" in output
    _, output = checked({"/v1/models": models, "/metrics": NOT_FOUND})
    assert "  engine     not detected" in output


ALIASES = """
models:
  good: {to: base}
  typo: {to: bsae}
  canary: {split: {base: 9, sql: 1}}
  half: {split: {base: 1, gone: 1, off: 0}}
  base: {fallback: [sql, lost, nowhere]}
"""


def test_names_that_lead_to_nobody() -> None:
    """The first request would be answered 404, and nobody would know why."""
    scripts: dict[str, Script] = {"/health": OK, "/v1/models": model_list("base", "sql", parent="base")}
    code, output = checked(scripts, ", metrics: null", settings=ALIASES)
    assert code == 0
    warnings = [line for line in output.splitlines() if "no endpoint serves" in line]
    assert warnings == [
        "models.typo: no endpoint serves bsae, so its requests get 404.",
        "models.half: no endpoint serves gone, so its requests get 404.",
        "models.base.fallback: no endpoint serves lost, nowhere.",
    ]
    flows = "models: {fast: base}\nflows: {default: {models: [base, sql, fast, 'q*']}, named: {x: {models: [lama]}}}"
    _, output = checked(scripts, ", metrics: null", settings=flows)
    warnings = [line for line in output.splitlines() if "no endpoint serves" in line]
    assert warnings == ["flows.named.x.models: no endpoint serves lama, and no alias is called so."]
    _, output = checked({"/health": OK}, ", metrics: null", settings=ALIASES)
    assert "no endpoint serves" not in output, "a server that does not say may serve anything"


def test_settings_that_the_policy_does_not_read() -> None:
    more = ", weight: 2, kv_cache_tokens: 300000"
    _, output = checked({"/health": OK}, more, settings="routing: {policy: round-robin}")
    assert "endpoints[].weight is ignored under policy round-robin: it does not compare endpoints by" in output
    assert (
        "endpoints[].kv_cache_tokens is ignored under policy round-robin: it does not follow prefix caches." in output
    )
    _, output = checked({"/health": OK}, more, settings="routing: {policy: adaptive}")
    assert "ignored" not in output


def test_certificates_that_nobody_verifies() -> None:
    _, output = checked({"/health": OK}, ", metrics: null")
    assert "certificates" not in output
    unsafe = "endpoints: [{url: 'https://127.0.0.1:9', name: gpu-9, tls: {verify: false}}]"
    console = Console(width=200, record=True, quiet=False, file=None, highlight=False, force_terminal=False)
    assert run(check(parse(unsafe, environ={}), console)) == 1
    assert "The certificates of gpu-9 are not verified (tls.verify: false)." in console.export_text()


def test_what_happens_to_an_endpoint_that_fails() -> None:
    _, output = checked({"/health": OK})
    assert (
        "Routing by adaptive; 5 failures in a row or less than 80% successful responses eject an endpoint for 1 s, "
        "then longer, 60 s at most; when it returns, its share grows for 30 s." in output
    )
    off = "breaker: {consecutive_failures: null, success_rate: 0}\nhealth: {slow_start: null}"
    _, output = checked({"/health": OK}, settings=off)
    assert "no endpoint is ejected for failures; when it returns, it has a full share at once." in output


def test_which_streams_are_asked_for_their_usage() -> None:
    _, output = checked({"/health": OK})
    assert "Servers are asked for the usage of streams: where a limit of tokens or `continue` applies." in output
    _, output = checked({"/health": OK}, settings="usage: {ask: never}")
    assert "Servers are asked for the usage of streams: never." in output


def test_names_from_servers_cannot_steer_the_terminal() -> None:
    adapters = "vllm:num_requests_running 1\n" + 'vllm:lora_requests_info{running_lora_adapters="x\x1b[2Jy"} 1\n'
    _, output = checked({"/health": OK, "/v1/models": model_list("b[red]c"), "/metrics": page(adapters.encode())})
    assert "\x1b" not in output
    assert "  models     b[red]c" in output
    assert "adapters in use: x[2Jy (" in output


def test_nobody_there() -> None:
    code, output = checked({"/health": answer(status=503)}, ", metrics: null")
    assert code == 1
    assert "  usable     no" in output
    assert "0 of 2 endpoints can be used." in output


def test_what_an_engine_never_shows_costs_something_too() -> None:
    _, output = checked({"/health": OK, "/metrics": page((FIXTURES / "llama.cpp-b11434-load.prom").read_bytes())})
    assert "  load       2 of 2 signals: waiting 3, running 2" in output
    assert f"  no signal  kv_utilization: {COSTS['kv_utilization']}" in output
    assert f"  no signal  block_size_tokens, kv_blocks: {COSTS['kv_blocks']}" in output
    assert "missing" not in output
    assert "reports" not in output


def test_whose_answers_will_be_asked_for_load() -> None:
    for name, said in (("vllm-0.32.0-load-lora-t0", ASKED), ("vllm-0.32.0-dp2-load", NOT_ASKED)):
        _, output = checked({"/health": OK, "/metrics": page((FIXTURES / f"{name}.prom").read_bytes())})
        assert f"  reports    {said}" in output


@pytest.mark.parametrize(
    ("more", "name", "said"),
    [
        ("", "vllm-0.32.0-dp2-idle", "2, an endpoint each"),
        (", ranks: 2", "vllm-0.32.0-dp2-load", "2, an endpoint each"),
        (", ranks: 1", "vllm-0.32.0-dp2-load", "2, which are one endpoint (ranks: 1): the server distributes"),
        (
            ", ranks: 3",
            "vllm-0.32.0-dp2-load",
            "3 by the settings, but its metrics show 2: requests for the others may",
        ),
        (", ranks: 3", None, "3 by the settings, an endpoint each"),
        ("", "vllm-0.32.0-load-lora-t0", None),
        (", ranks: 1", None, None),
    ],
)
def test_data_parallel_ranks(more: str, name: str | None, said: str | None) -> None:
    shown = NOT_FOUND if name is None else page((FIXTURES / f"{name}.prom").read_bytes())
    _, output = checked({"/health": OK, "/metrics": shown}, more)
    if said is None:
        assert "  ranks" not in output
    else:
        assert f"  ranks      {said}" in output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (", kv_events: ':5557'", ["KV events  :5557 to port 5558, one for each rank; lost events are not asked for"]),
        (", ranks: 1, kv_events: ':5557'", ["KV events  :5557; lost events are not asked for"]),
        (
            ", ranks: 2, kv_events: ':5557', kv_events_replay: ':5657'",
            ["KV events  :5557 to port 5558, one for each rank; replay :5657"],
        ),
        (
            ", kv_events: 'tcp://gpu-1:5557', kv_events_replay: 'tcp://gpu-1:5558'",
            [
                "KV events  tcp://gpu-1:5557 to port 5558, one for each rank; replay tcp://gpu-1:5558",
                "problem    the ports of 2 ranks meet those of their replays: leave 2 ports to each",
            ],
        ),
    ],
)
def test_where_kv_events_are_read(more: str, said: list[str]) -> None:
    """A server of two ranks, which the settings may not say."""
    shown = page((FIXTURES / "vllm-0.32.0-dp2-load.prom").read_bytes())
    _, output = checked({"/health": OK, "/metrics": shown}, more)
    assert all(f"  {line}" in output for line in said), output


def test_every_line_fits_a_terminal_of_80_columns() -> None:
    for name in ("vllm-0.32.0-load-lora-t0", "vllm-0.32.0-dp2-idle", "llama.cpp-b11434-load"):
        scripts: dict[str, Script] = {
            "/health": OK,
            "/v1/models": model_list(
                "meta-llama/Llama-3.1-8B-Instruct", "sql", parent="meta-llama/Llama-3.1-8B-Instruct"
            ),
            "/metrics": page((FIXTURES / f"{name}.prom").read_bytes()),
        }
        _, output = checked(scripts, width=80)
        assert max(map(len, output.splitlines())) <= 80


def test_a_state_file_that_cannot_be_written() -> None:
    _, output = checked({}, settings="state: {file: /proc/lbproxy/state}")
    assert "state.file: /proc/lbproxy/state cannot be written: there is no folder /proc/lbproxy." in output
    assert "state.file" not in checked({}, settings="state: {file: /tmp/state}")[1]


def test_a_budget_that_a_restart_would_forget() -> None:
    warning = "gpu-1: tokens_per_day without state.file, so each restart of lbproxy begins a new day."
    assert warning in checked({}, ", tokens_per_day: 1000")[1]
    assert "state.file" not in checked({}, ", tokens_per_day: 1000", settings="state: {file: /tmp/state}")[1]
    assert "state.file" not in checked({}, ", tokens_per_minute: 1000")[1]


# --- Replicas ---------------------------------------------------------------------------------------------------------


def checked_replicas(url: str) -> str:
    """The paragraph about the store."""
    _, output = checked({"/health": OK, "/metrics": NOT_FOUND}, settings=f"replicas: {{url: '{url}', name: me}}")
    return output.partition("\nreplicas: ")[2].partition("\n")[0]


@needs_redis
def test_the_store_of_the_replicas_is_dialled(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "s3cret") as server:
        url = server.url.replace("//", "//:s3cret@")

        async def beat(name: str, version: str) -> None:
            store = RedisStore(url, "default")
            await store.beat(
                f"{name}-1", orjson.dumps({"name": name, "version": version, "started_at": 1.0, "running": True})
            )
            await store.close()

        assert checked_replicas(url) == f"{server.url} can be used; pool default, replicas that are alive: none."
        run(beat("lb-2", __version__))
        said = checked_replicas(url)
        assert said == f"{server.url} can be used; pool default, replicas that are alive: lb-2 ({__version__})."
        run(beat("lb-3", "9.9"))
        assert "lb-3 (9.9)" in (said := checked_replicas(url))
        assert "different versions may not understand" in said
        assert "check" not in str(server.client(password="s3cret").keys()), "it left something behind"


@needs_redis
def test_what_is_wrong_with_the_store_is_said_in_words(tmp_path: Path) -> None:
    tls, pem = free_port(), str(FOLDER / "server.pem")
    options = ("--tls-port", str(tls), "--tls-cert-file", pem, "--tls-key-file", pem, "--tls-ca-cert-file", str(CA))
    with redis_server(tmp_path, *options, "--tls-auth-clients", "no") as server:
        alone = "cannot be used, so lbproxy would go on alone: "
        assert "certificate verify failed" in checked_replicas(f"rediss://localhost:{tls}")
        assert "perhaps it wants TLS: rediss://" in checked_replicas(f"redis://127.0.0.1:{tls}")
        assert "perhaps it does not use TLS" in checked_replicas(server.url.replace("redis:", "rediss:"))
        server.call("REPLICAOF", "127.0.0.1", "1")
        assert f"{alone}the server is read-only: " in checked_replicas(server.url)
        server.call("REPLICAOF", "NO", "ONE")
        server.call("CONFIG", "SET", "maxmemory", "1")
        assert "the server's memory is full: " in checked_replicas(server.url)
        server.call("CONFIG", "SET", "maxmemory", "0")
        server.call("CONFIG", "SET", "requirepass", "s3cret")
        said = checked_replicas(server.url.replace("//", "//user:wrong@"))
        assert f"{server.url} {alone}wrong user or password: " in said
        assert "user:wrong" not in said
    assert "refused" in checked_replicas(server.url)


REPLICAS = f"replicas.url: {needs('replicas')}"
KV_EVENTS = f"endpoints[1].kv_events: {needs('kv-events')}"


@pytest.mark.parametrize(
    ("package", "more", "problem"),
    [
        ("redis", "replicas: {url: redis://r}\nendpoints: [http://gpu-1]", REPLICAS),
        ("zmq", "endpoints: [http://gpu-1, {url: http://gpu-2, kv_events: ':5557'}]", KV_EVENTS),
    ],
)
@pytest.mark.parametrize("command", ["run", "check"])
def test_without_the_packages_the_error_says_what_to_install(
    tmp_path: Path, command: str, package: str, more: str, problem: str
) -> None:
    """A package of that name hides the real one."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise ModuleNotFoundError('none', name='{package}')")
    config = tmp_path / "cfg.yaml"
    config.write_text(f"listen: 127.0.0.1:0\nadmin: null\n{more}\n")
    arguments = ["--config", str(config)] if command == "run" else ["check", "--config", str(config)]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*LBPROXY, *arguments], capture_output=True, text=True, env=environ, timeout=60, check=False)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert problem in said
    assert "Traceback" not in said


# --- Prefill and decode apart -----------------------------------------------------------------------------------------

NIXL = b"vllm:num_requests_running 1\nvllm:nixl_num_failed_transfers_total 0\n"


def sglang(mode: str | None) -> dict[str, Script]:
    said = {"max_total_num_tokens": 64000, "disaggregation_mode": mode, "disaggregation_bootstrap_port": 9001}
    return {"/health": OK, "/v1/models": model_list("m"), "/server_info": answer(orjson.dumps(said))}


def vllm(metrics: bytes) -> dict[str, Script]:
    return {"/health": OK, "/v1/models": model_list("m"), "/metrics": page(metrics)}


def test_role_and_connector_are_shown_with_where_they_come_from() -> None:
    _, output = checked(sglang("prefill"), ", engine: sglang")
    assert "  role       prefill (as it reports)" in output
    assert "  connector  sglang (as it shows), bootstrap port 9001" in output
    _, output = checked(vllm(NIXL), ", role: decode")
    assert "  role       decode (by the settings)" in output
    assert "  connector  nixl (as it shows)\n" in output
    _, output = checked(vllm(b"vllm:num_requests_running 1\n"), ", role: prefill, connector: mooncake")
    assert "  connector  mooncake (by the settings), bootstrap port 8998" in output
    _, output = checked(vllm(b"vllm:num_requests_running 1\n"))
    assert "  role " not in output
    assert "  connector " not in output


def test_roles_that_do_not_fit_are_said() -> None:
    _, output = checked(vllm(NIXL), ", role: prefill")
    assert "gpu-1: role prefill, but no decode endpoint has connector nixl" in output
    _, output = checked(vllm(b"vllm:num_requests_running 1\n"), ", role: decode")
    assert "  connector  unknown: not configured, and not recognised" in output
    assert "gpu-1: role decode, but no connector is configured" in output
    _, output = checked(vllm(NIXL), ", role: prefill, connector: mooncake")
    assert "gpu-1: the settings say connector: mooncake, its engine has nixl" in output
    assert "  connector  mooncake (by the settings)" in output, "which lbproxy would use"
    _, output = checked(sglang(None), ", engine: sglang, role: prefill")
    assert "gpu-1: the settings say role: prefill, its engine says both" in output
    _, output = checked(sglang("decode"), ", engine: sglang")
    assert "m: only sglang endpoints with a role serve it" in output


@pytest.mark.parametrize("mode", ['"dynamic"', "7", "[]", '{"a":1}', '"prefill\\u0000"'])
def test_a_mode_that_is_not_known_is_no_role(mode: str) -> None:
    said = b'{"max_total_num_tokens":64000,"disaggregation_mode":' + mode.encode() + b"}"
    code, output = checked({"/health": OK, "/server_info": answer(said)}, ", engine: sglang")
    assert code == 0
    assert "  role " not in output


@pytest.mark.parametrize(
    ("more", "own", "warns"),
    [
        ("", "", True),
        ("", ", api_key: sk-1", False),
        ("auth: {keys: [0123456789abcdef]}\n", "", False),
    ],
)
def test_a_provider_that_would_get_clients_keys_is_warned_of(more: str, own: str, warns: bool) -> None:
    text = f"{more}endpoints: [http://a:1, {{url: https://b/v1, name: b, tier: 2{own}}}]"
    warnings = list(_keyless(parse(text, environ={})))
    assert bool(warnings) == warns
    assert all(one.startswith("b: above tier 1 without api_key") for one in warnings)
