# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments to calls. No logic of its own; uvloop is chosen here, and files are read here.

Exit codes: 0 = done, 1 = it could not be done (said on stderr), 2 = the arguments or the settings are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from lbproxy import __version__
from lbproxy.config import addresses
from lbproxy.config.text import ConfigError
from lbproxy.extras.installing import needs
from lbproxy.processes import process

# The settings are imported by commands that read some: pydantic takes 0.2 s of CPU, which the others need not wait for.
if TYPE_CHECKING:
    from rich.console import Console

    from lbproxy.config.tree import Settings

T = TypeVar("T")
ASKED = ("endpoints", "requests")
"""What a completion script asks a running lbproxy for."""
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command in {None, "check"} and args.config is None:
        parser.error("--config FILE is required; or try: lbproxy demo")
    try:
        return int(_COMMANDS[args.command](args))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except _CannotError as error:
        print(f"lbproxy {args.command}: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"lbproxy: {error}", file=sys.stderr)
        return 1


class _CannotError(Exception):
    """A command cannot be carried out; the text says why. `code`: its exit code."""

    def __init__(self, why: object, code: int) -> None:
        super().__init__(str(why))
        self.code = code


@contextmanager
def _says(kind: type[Exception], code: int) -> Iterator[None]:
    """Ends the command with the text of such an exception, and this exit code."""
    try:
        yield
    except kind as error:
        raise _CannotError(error, code) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lbproxy", description="Load balancer for LLM servers. `lbproxy --config FILE` runs it."
    )
    version = f"lbproxy {__version__} ({'compiled' if process.is_compiled() else 'pure Python'})"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--config", metavar="FILE", help="settings (YAML); config.example.yaml explains every key")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    what = "validate the settings and test every endpoint"
    exits = "Exit code: 0 if at least one endpoint can be used, 1 if none can, 2 if the settings are wrong."
    check = commands.add_parser("check", help=what, description=f"{what.capitalize()}. {exits}")
    check.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS)
    what = "1 also if any endpoint cannot be used, or anything is warned of"
    check.add_argument("--strict", action="store_true", help=what)

    commands.add_parser("schema", help="print the JSON schema of the settings, for editors")

    demo = commands.add_parser("demo", help="three simulated vLLM servers and lbproxy; no GPU needed")
    at, own = "HOST:PORT", f"where {{}} listens: {addresses.FORMS} (default: %(default)s)"
    demo.add_argument("--listen", type=addresses.listener, default=addresses.LISTEN, metavar=at, help=own.format("it"))
    what = own.format("its admin")
    demo.add_argument("--admin", type=addresses.listener, default=addresses.ADMIN, metavar=at, help=what)
    what = "worker processes that relay, as with `workers` in the settings (default: 1, all in one process)"
    demo.add_argument("--workers", type=int, choices=range(1, 65), metavar="N", default=1, help=what)
    what = "2 to 4 lbproxies on consecutive ports, which share what they know over a Redis or Valkey server of the demo"
    demo.add_argument("--replicas", type=int, choices=range(2, 5), metavar="N", help=what)
    what = "six servers with everyday traffic, of which one slows down, one is killed, and two are drained"
    demo.add_argument("--traffic", action="store_true", help=what)
    what = "two prefill and two decode servers: requests are split between them"
    demo.add_argument("--disaggregated", action="store_true", help=what)
    demo.add_argument(
        "--duration",
        type=_seconds,
        metavar="DURATION",
        default=150.0,
        help="duration of --traffic, 30s to 1h (default: 150)",
    )
    demo.add_argument(
        "--rate", type=float, metavar="N", default=12.0, help="requests per second of --traffic (default: 12)"
    )
    demo.add_argument("--seed", type=int, default=1, metavar="N", help="random seed of --traffic (default: 1)")

    _add_mock(commands.add_parser("mock", help="one simulated vLLM server"))

    sim = commands.add_parser("sim", help="compare policies on a simulated fleet, in virtual time")
    sim.add_argument("scenario", nargs="?", metavar="FILE", help="what to simulate (YAML): docs/simulator.md")
    sim.add_argument("--list", action="store_true", help="show the workloads and their parameters")
    sim.add_argument("--processes", type=int, default=os.cpu_count(), help="parallel simulations (default: CPUs)")
    sim.add_argument("--json", metavar="FILE", help="write all figures to this file")
    sim.add_argument("--markdown", metavar="FILE", help="write the tables to this file")
    sim.add_argument("--plot", metavar="FILE", help="draw the figures: .png, .svg or .pdf (needs matplotlib)")
    _add_admin_commands(commands)
    return parser


def _add_mock(mock: argparse.ArgumentParser) -> None:
    mock.add_argument("--host", default="127.0.0.1", help="where it listens (default: 127.0.0.1)")
    mock.add_argument("--port", type=int, default=8000, help="0 = any free port (default: 8000)")
    mock.add_argument("--model", default="sim", help="the served model's name (default: sim)")
    mock.add_argument("--preset", default="llama-8b-h100", help="model and GPU to simulate (default: llama-8b-h100)")
    mock.add_argument("--speed", type=float, default=1.0, help="2 = twice as fast as the preset")
    mock.add_argument("--kv-tokens", type=int, help="size of the KV cache (default: the preset's)")
    mock.add_argument("--no-prefix-cache", dest="prefix_cache", action="store_false", help="it caches no prompts")
    mock.add_argument("--max-num-seqs", type=int, help="requests that run at the same time (default: the preset's)")
    mock.add_argument(
        "--max-model-len", type=int, help="tokens of prompt and response together (default: the preset's)"
    )
    mock.add_argument("--ranks", type=int, default=1, help="data-parallel ranks behind the address (default: 1)")
    what = "fixed time to first token; without it, as the preset's engine takes"
    mock.add_argument("--ttft", type=_seconds, metavar="DURATION", help=what)
    what = "variation of --ttft, with uniform a share of it (default: 0)"
    mock.add_argument("--ttft-spread", type=float, default=0.0, metavar="SHARE", help=what)
    forms = ["uniform", "lognormal", "bimodal", "heavy", "prompt"]
    what = "distribution of --ttft, as in scenarios (default: uniform)"
    mock.add_argument("--ttft-form", choices=forms, default="uniform", help=what)
    what = "with --ttft: time from token to token (default: 0.02)"
    mock.add_argument("--token-time", type=_seconds, default=0.02, metavar="DURATION", help=what)
    what = "tokens in one event of a stream of text, as vLLM's (default: 1)"
    mock.add_argument("--stream-interval", type=int, default=1, metavar="TOKENS", help=what)
    what = "the engine that it reports as in its models and server info (default: vllm); only vllm has metrics"
    mock.add_argument(
        "--engine", choices=["vllm", "sglang", "llamacpp", "ollama", "lmstudio"], default="vllm", help=what
    )
    mock.add_argument(
        "--metric-names", choices=["current", "old"], default="current", help="old: the names of vLLM 0.8"
    )
    mock.add_argument("--seed", type=int, default=0, help="servers with the same seed give the same responses")
    what = "a fault, such as 'status code=503 share=0.2 for=10'; may be given several times"
    mock.add_argument("--fault", action="append", default=[], help=what)
    what = "a LoRA adapter, or a further model of --engine ollama, llamacpp, lmstudio; may be given several times"
    mock.add_argument("--adapter", action="append", default=[], metavar="NAME", help=what)
    mock.add_argument(
        "--max-loras", type=int, default=1, help="adapters that run at the same time (default: 1, as in vLLM)"
    )
    what = "models in memory at a time, with --engine ollama, llamacpp, lmstudio (default: 3)"
    mock.add_argument("--max-loaded", type=int, default=3, metavar="N", help=what)
    what = "how long loading one takes (default: 0)"
    mock.add_argument("--load-time", type=_seconds, default=0.0, metavar="DURATION", help=what)
    what = "allow loading and unloading of adapters over HTTP"
    mock.add_argument("--lora-updates", action="store_true", help=what)
    _add_transfer(mock.add_argument_group("prefill and decode on different servers"))
    _add_sleep(mock.add_argument_group("sleep mode"))
    _add_provider(mock.add_argument_group("a paid provider"))


def _add_sleep(mock: argparse._ArgumentGroup) -> None:
    """Options of a simulated server that sleeps."""
    what = "it can be put to sleep and woken: /sleep, /wake_up, /is_sleeping, as with vLLM's --enable-sleep-mode"
    mock.add_argument("--sleep-mode", action="store_true", help=what)
    mock.add_argument("--asleep", action="store_true", help="it sleeps from the start")
    what = "how long a wake takes (default: 3)"
    mock.add_argument("--wake-time", type=_seconds, default=3.0, metavar="DURATION", help=what)
    what = "how long it takes to fall asleep (default: 1)"
    mock.add_argument("--sleep-time", type=_seconds, default=1.0, metavar="DURATION", help=what)
    what = "a GPU that it shares with other simulated servers: a wake fails while another that is awake has it"
    mock.add_argument("--gpu", metavar="NAME", help=what)


def _seconds(text: str) -> float:
    """A duration: `60`, `60s`, `250ms`, `2m` or `1h`. Raises ArgumentTypeError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:[.][0-9]{1,9})?)(ms|s|m|h|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a duration such as 60, 60s or 2m, got {text!r}")
    return float(found[1]) * {"ms": 0.001, "m": 60.0, "h": 3600.0}.get(found[2], 1.0)


def _every(text: str) -> float:
    """From a second to an hour."""
    seconds = _seconds(text)
    if not 1.0 <= seconds <= 3600.0:
        raise argparse.ArgumentTypeError(f"expected 1s to 1h, got {text!r}")
    return seconds


def _add_transfer(mock: argparse._ArgumentGroup) -> None:
    """Options of a simulated server that gets the KV of prompts from others, or gives it."""
    what = "what it is for (default: both)"
    mock.add_argument("--role", choices=["both", "prefill", "decode"], default="both", help=what)
    what = "how the KV of prompts gets from server to server (default: not at all); sglang needs --engine sglang"
    mock.add_argument("--connector", choices=["nixl", "shared-storage", "sglang", "mooncake"], help=what)
    what = "how long prefilled KV is held, or the halves of a request wait (default: nixl 30, sglang 300, mooncake 480)"
    mock.add_argument("--kv-lease", type=_seconds, metavar="DURATION", help=what)
    what = "nixl: whether a request whose KV cannot be loaded fails or is computed (default: fail)"
    mock.add_argument("--kv-load-failure", choices=["fail", "recompute"], default="fail", help=what)
    what = "nixl, mooncake: where other servers reach it; 0 = any free port (default: 0)"
    mock.add_argument("--side-channel-port", type=int, default=0, metavar="PORT", help=what)
    what = "sglang, mooncake: where decodes meet prefills; 0 = any free port (default: 8998)"
    mock.add_argument("--bootstrap-port", type=int, metavar="PORT", help=what)
    mock.add_argument("--shared-storage-path", metavar="DIR", help="shared-storage: the folder that the servers share")
    what = "publish KV events, at tcp://*:5557; tcp://host:5557 connects there (needs the extra kv-events)"
    mock.add_argument("--kv-events", metavar="URL", help=what)
    mock.add_argument("--kv-events-replay", metavar="URL", help="replay lost ones, at tcp://*:5657")


def _add_provider(mock: argparse._ArgumentGroup) -> None:
    """Options of a simulated server that is a paid provider."""
    what = "be a paid provider: OpenAI's errors, no /health and no /metrics; each of the following implies it"
    mock.add_argument("--provider", action="store_true", help=what)
    mock.add_argument("--path-prefix", metavar="PATH", help="where its API is (default: /v1), such as /openai/v1")
    mock.add_argument("--require-key", metavar="KEY", help="the API key that it accepts (default: any)")
    mock.add_argument("--requests-per-minute", type=int, metavar="N", help="limit of requests (default: no limit)")
    what = "limit of tokens, of prompts and what they may generate (default: no limit)"
    mock.add_argument("--tokens-per-minute", type=int, metavar="N", help=what)


def _add_admin_commands(commands: Subparsers) -> None:
    """Those that speak to a running lbproxy."""
    remote = argparse.ArgumentParser(add_help=False)
    text = f"{addresses.ADMIN_FORMS} (default: LBPROXY_ADMIN, else {addresses.ADMIN}); token: in LBPROXY_ADMIN_TOKEN"
    default = os.environ.get("LBPROXY_ADMIN") or addresses.ADMIN
    remote.add_argument("--admin", type=addresses.url, metavar="HOST:PORT", default=default, help=text)
    status = commands.add_parser(
        "status", parents=[remote], help="show the state of a running lbproxy and its endpoints"
    )
    status.add_argument("--json", action="store_true", help="the complete state, as JSON")
    status.add_argument("--legend", action="store_true", help="say what the columns mean")
    what = "who used how many tokens, by day (UTC), flow and model"
    usage = commands.add_parser("usage", help=what)
    usage.add_argument(
        "--days", type=int, choices=range(1, 401), metavar="N", default=30, help="1 to 400 (default: 30)"
    )
    usage.add_argument("--json", action="store_true", help="the same, as JSON")
    what = "settings: of the lbproxy that runs with them, or of the files that it left"
    usage.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=what)
    usage.add_argument(
        "--admin", type=addresses.url, metavar="HOST:PORT", action="append", help=f"{text}; several: their sum"
    )
    commands.add_parser("top", parents=[remote], help="the same, live; q quits")
    drain = commands.add_parser("drain", parents=[remote], help="stop sending new requests to an endpoint")
    drain.add_argument("name", metavar="NAME", help="the endpoint's name, as in `lbproxy status`")
    drain.add_argument("--wait", action="store_true", help="wait until its last request has ended")
    drain.add_argument(
        "--timeout", type=_seconds, metavar="DURATION", help="wait no longer than this; then exit with 1"
    )
    drain.add_argument(
        "--move-after",
        type=_seconds,
        metavar="DURATION",
        help="after so long its streams go on at other endpoints, if they can (see `continue` in docs/failures.md)",
    )
    drain.add_argument("--force", action="store_true", help="even if no other endpoint takes requests for its models")
    undrain = commands.add_parser("undrain", parents=[remote], help="send requests to an endpoint again")
    undrain.add_argument("name", metavar="NAME")
    for name, what in (("sleep", "put an endpoint to sleep"), ("wake", "wake an endpoint that sleeps")):
        commands.add_parser(name, parents=[remote], help=what).add_argument("name", metavar="NAME")
    what = "have running lbproxies know a model server for as long as this runs beside it"
    register = commands.add_parser("register", help=what)
    what = "its URL, or a YAML mapping as in `endpoints`: '{url: \"http://10.0.0.7:8000\", name: gpu-7}'"
    register.add_argument("endpoint", metavar="ENDPOINT", help=what)
    what = "how often; without it for three times as long it is drained and removed (default: 10s)"
    register.add_argument("--every", type=_every, metavar="DURATION", default=10.0, help=what)
    register.add_argument(
        "--admin", type=addresses.url, metavar="HOST:PORT", action="append", help=f"{text}; may be given several times"
    )
    commands.add_parser("reload", parents=[remote], help="read the settings again, and say what changed")
    what = "print a shell completion script, or what such a script asks for: names of endpoints, ids of requests"
    completion = commands.add_parser("completion", parents=[remote], help=what)
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh", *ASKED])
    what = "print a link to the dashboard, with the token for its buttons"
    commands.add_parser("dashboard", parents=[remote], help=what)
    what = "print the token that changes by the admin API need, for curl"
    commands.add_parser("admin-token", parents=[remote], help=what)
    explain = commands.add_parser("explain", parents=[remote], help="explain why a request went where it went")
    explain.add_argument("id", metavar="ID", nargs="?", help="its x-request-id (default: the last that ended)")
    explain.add_argument("--json", action="store_true", help="the complete data, as JSON")


def _run(args: argparse.Namespace) -> int:
    from lbproxy.processes.settings_file import parse_text, read_text  # noqa: PLC0415

    text = read_text(args.config)
    settings = parse_text(text, args.config)
    # What a start makes stays: to look through it for garbage again and again takes a twentieth of the start.
    gc.disable()
    from lbproxy.net.listening.inherit import own_command  # noqa: PLC0415
    from lbproxy.processes import app  # noqa: PLC0415 - heavy, and `--help` or a bad file need not wait for it
    from lbproxy.processes.control import Text  # noqa: PLC0415
    from lbproxy.processes.supervisor import supervise, worker_count  # noqa: PLC0415

    def start(told: Signals) -> Coroutine[object, object, None]:
        read = partial(_read_settings, args.config)
        orders = app.Orders(told.stop, told.hurry, read_settings=read, command=own_command())
        told.exiting = lambda: orders.exiting()  # noqa: PLW0108 - set later
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, orders.reload.set)
        loop.add_signal_handler(signal.SIGUSR2, orders.restart.set)
        if worker_count(settings) > 1:
            return supervise(settings, Text(text, args.config), orders=orders, on_ready=_warn_if_interpreted)
        return app.serve(settings, orders=orders, on_ready=_warn_if_interpreted)

    _run_until_signal(start)
    return 0


def _warn_if_interpreted(_: object) -> None:
    """Called once, by the process that was started, whose log is set up by then."""
    if not process.is_compiled():
        logging.getLogger("lbproxy").warning(process.NOT_COMPILED, extra={"event": "start"})


def _check(args: argparse.Namespace) -> int:
    settings = _read_settings(args.config)
    from lbproxy.commands.check import check  # noqa: PLC0415

    return process.run(check(settings, _piped(), strict=args.strict))


def _console(width: int = 120) -> Console:
    """One that, into a file or a pipe, is as wide as the tables need."""
    from rich.console import Console  # noqa: PLC0415

    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


def _piped() -> Console:
    """One that goes on where nobody reads on, as after `| head`: what was found still decides the exit code."""
    from rich import console  # noqa: PLC0415

    class Piped(console.Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return Piped(highlight=False, soft_wrap=True)


def _schema(_: argparse.Namespace) -> int:
    from lbproxy.config.parse import json_schema  # noqa: PLC0415

    print(json.dumps(json_schema(), indent=2))
    return 0


def _completion(args: argparse.Namespace) -> int:
    if args.shell in ASKED:
        return _remote(args)
    try:
        import shtab  # noqa: PLC0415 - an extra
    except ImportError:
        print(f"lbproxy completion {needs('completion')}", file=sys.stderr)
        return 1
    parser = _parser()
    files = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}
    for action in _actions(parser):
        if action.metavar in files:
            action.complete = files[action.metavar]  # type: ignore[attr-defined]  # shtab reads it
        elif action.dest in _COMPLETED:
            name = f"_lbproxy_{_COMPLETED[action.dest]}"
            action.complete = {"bash": name, "zsh": name}  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell, preamble=_PREAMBLES))  # type: ignore[arg-type]  # or one for each shell
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments of all commands that act on files, or by the names of a running lbproxy."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                if name not in {"mock", "demo"}:  # their names are new
                    yield from _actions(command)


_COMPLETED = {"name": "endpoints", "id": "requests"}
"""What an argument of this name is one of."""
_PREAMBLES = {
    "bash": "".join(
        f'_lbproxy_{what}() {{ compgen -W "$(lbproxy completion {what} 2>/dev/null)" -- "$1"; }}\n' for what in ASKED
    ),
    "zsh": "".join(
        f'_lbproxy_{what}() {{ compadd -- ${{(f)"$(lbproxy completion {what} 2>/dev/null)"}}; }}\n' for what in ASKED
    ),
}
"""Functions of the shell."""


def _demo(args: argparse.Namespace) -> int:
    if args.disaggregated and (args.replicas or args.traffic):
        other = "--replicas" if args.replicas else "--traffic"
        raise _CannotError(f"--disaggregated cannot be used with {other}", 1)
    from lbproxy.demo.taken import find_taken  # noqa: PLC0415

    taken = asyncio.run(find_taken(args.listen, args.admin, sys.argv[1:], count=args.replicas or 1))
    if taken is not None:
        raise _CannotError(taken, 1)
    if args.replicas:
        return _demo_replicas(args)
    if args.traffic:
        return _demo_traffic(args)
    from lbproxy.demo.first import run_demo  # noqa: PLC0415

    options = {"workers": args.workers, "disaggregated": args.disaggregated}
    _run_until_signal(lambda told: run_demo(args.listen, args.admin, told.stop, **options))
    return 0


def _demo_replicas(args: argparse.Namespace) -> int:
    from lbproxy.demo import replicas  # noqa: PLC0415
    from lbproxy.demo.fleet import FleetError  # noqa: PLC0415

    if args.traffic or args.workers > 1:
        other = "--traffic" if args.traffic else "--workers"
        raise _CannotError(f"--replicas cannot be used with {other}, which shows a single lbproxy", 2)
    with _says(ValueError, 2):
        options = replicas.ReplicasOptions(replicas=args.replicas, listen=args.listen, admin=args.admin)
        store = replicas.find_store_program()
    say = partial(print, flush=True)
    with _says(FleetError, 1):
        _run_until_signal(lambda told: replicas.run_replicas(options, store, told.stop, say))
    return 0


def _demo_traffic(args: argparse.Namespace) -> int:
    from lbproxy.demo import show, traffic  # noqa: PLC0415
    from lbproxy.demo.fleet import FleetError  # noqa: PLC0415

    console = _console()
    with _says(ValueError, 2):
        options = traffic.TrafficOptions(
            listen=args.listen, admin=args.admin, duration_s=args.duration, seed=args.seed, rate=args.rate
        )
    last: traffic.View | None = None

    async def night(told: Signals) -> None:
        nonlocal last
        with show.Drawn(console) if console.is_terminal else show.Printed() as shown:
            last = await traffic.run_traffic(options, told.stop, shown)

    print("Six simulated servers and lbproxy are started ...", flush=True)
    with _says(FleetError, 1):
        _run_until_signal(night)
    if last is not None:
        show.summary(last, console)
    return 0


def _mock(args: argparse.Namespace) -> int:
    from lbproxy.sim.mock.http import MockOptions, MockServer  # noqa: PLC0415
    from lbproxy.sim.mock.mock_options import ENGINES  # noqa: PLC0415

    given = {name: value for name, value in vars(args).items() if name not in {"command", "config", "fault", "adapter"}}
    with _says(ValueError, 2):
        options = MockOptions(**given, faults=tuple(args.fault), adapters=tuple(args.adapter))
    if options.kv_events is not None:
        try:
            import zmq  # noqa: F401, PLC0415 - an extra
        except ImportError:
            raise _CannotError(f"--kv-events {needs('kv-events')}", 2) from None

    async def until(told: Signals) -> None:
        async with MockServer(options) as server:
            what = f"simulated {ENGINES[options.engine]}, {options.preset}"
            print(f"{what}, serves {options.model!r} at {server.url}", flush=True)
            await told.stop.wait()

    _run_until_signal(until)
    return 0


def _sim(args: argparse.Namespace) -> int:
    from lbproxy.commands import sim  # noqa: PLC0415

    console = _console(110)
    if args.list:
        sim.show_workloads(console)
        return 0
    form = Path(args.plot or ".png").suffix.removeprefix(".")
    problem = sim.unusable(scenario=args.scenario, processes=args.processes, plot=args.plot and form)
    if problem is not None:
        raise _CannotError(problem, 2)
    from lbproxy.config.parse import parse_scenario  # noqa: PLC0415
    from lbproxy.processes.settings_file import read_text  # noqa: PLC0415

    scenario = parse_scenario(read_text(args.scenario), environ=os.environ, source=args.scenario)
    trace = next((one.trace for one in scenario.sources if one.trace), None)
    lines = None if trace is None else Path(trace).read_text("utf-8").splitlines()
    runs = sim.runs_of(scenario, source=args.scenario, trace=lines)
    comparison = sim.compare(runs, processes=args.processes, console=console)
    sim.show(comparison, console)
    if args.json:
        Path(args.json).write_bytes(comparison.json())
    if args.markdown:
        Path(args.markdown).write_bytes(comparison.markdown())
    if args.plot:
        Path(args.plot).write_bytes(comparison.plot(form))
    return 0


def _remote(args: argparse.Namespace) -> int:
    from lbproxy.commands import operate  # noqa: PLC0415
    from lbproxy.commands.client import AdminClient, AdminError  # noqa: PLC0415

    console = _console()
    try:
        client = AdminClient(args.admin, os.environ.get("LBPROXY_ADMIN_TOKEN"))
        match args.command:
            case "status":
                return operate.status(client, console, as_json=args.json, legend=args.legend)
            case "top":
                return operate.top(client, console)
            case "drain":
                return operate.drain(
                    client,
                    console,
                    args.name,
                    wait_s=(inf if args.timeout is None else args.timeout) if args.wait else None,
                    force=args.force,
                    move_after_s=args.move_after,
                )
            case "undrain":
                return operate.undrain(client, console, args.name)
            case "sleep" | "wake":
                return operate.set_awake(client, console, args.name, awake=args.command == "wake")
            case "completion":
                return operate.names(client, of_requests=args.shell == "requests")
            case "reload":
                return operate.reload(client, console)
            case "admin-token":
                return operate.admin_token(client)
            case "dashboard":
                return operate.dashboard(client)
            case _:
                return operate.explain(client, console, args.id, as_json=args.json)
    except AdminError as error:
        raise _CannotError(error, 1) from None
    except KeyboardInterrupt:
        return 130


def _register(args: argparse.Namespace) -> int:
    from lbproxy.commands.register import MAX_ADMINS, read_entry, register  # noqa: PLC0415

    urls = args.admin or [addresses.url(os.environ.get("LBPROXY_ADMIN") or addresses.ADMIN)]
    if len(urls) > MAX_ADMINS:
        raise _CannotError(f"expected at most {MAX_ADMINS} times --admin", 2)
    entry, token = read_entry(args.endpoint), os.environ.get("LBPROXY_ADMIN_TOKEN")

    def say(line: str) -> None:
        print(f"{line}\n", end="", flush=True)  # in one piece, as threads do

    return register(entry, urls, token, every_s=args.every, say=say)


def _usage(args: argparse.Namespace) -> int:
    from lbproxy.commands.client import AdminError  # noqa: PLC0415
    from lbproxy.commands.usage import usage  # noqa: PLC0415

    settings, urls = None, args.admin
    if args.config is not None:
        settings = _read_settings(args.config)
        if urls is None:
            own = settings.admin
            urls = [] if own is None else [f"unix:{own.unix}" if own.unix else f"http://{own.host}:{own.port}"]
    elif urls is None:
        urls = [os.environ.get("LBPROXY_ADMIN") or addresses.url(addresses.ADMIN)]
    token = os.environ.get("LBPROXY_ADMIN_TOKEN")
    with _says(AdminError, 1):
        return usage(urls, settings, token, _console(), days=args.days, as_json=args.json)


_COMMANDS: dict[str | None, Callable[[argparse.Namespace], int]] = {
    None: _run,
    "check": _check,
    "schema": _schema,
    "completion": _completion,
    "demo": _demo,
    "mock": _mock,
    "register": _register,
    "sim": _sim,
    "usage": _usage,
    **dict.fromkeys(
        ("status", "top", "drain", "undrain", "sleep", "wake", "reload", "explain", "admin-token", "dashboard"), _remote
    ),
}


def _read_settings(path: str) -> Settings:
    """The settings in a file. Raises ConfigError, OSError."""
    from lbproxy.processes.settings_file import parse_text, read_text  # noqa: PLC0415

    return parse_text(read_text(path), path)


@dataclass
class Signals:
    """What signals say to a command that runs until one arrives. Made inside the running loop."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """SIGTERM or SIGINT."""
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    """SIGINT: somebody at a terminal."""
    exiting: Callable[[], None] = lambda: None
    """Called at a second signal, after which the process exits. Set by the command."""


def _run_until_signal(start: Callable[[Signals], Coroutine[object, object, None]]) -> None:
    """Run what `start` makes; a second SIGTERM or SIGINT ends it at once."""

    async def run() -> None:
        told, signalled = Signals(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if signalled.is_set():
                os.write(2, b"lbproxy: second signal: exit immediately\n")
                told.exiting()
                os._exit(1)
            signalled.set()
            if number == signal.SIGINT:
                told.hurry.set()
            told.stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        await start(told)

    process.run(run())


if __name__ == "__main__":
    sys.exit(main())
