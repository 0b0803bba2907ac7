# SPDX-License-Identifier: Apache-2.0
"""How long large bodies hold the event loop: the longest turn while one goes from a client to an endpoint.

    .venv/bin/python -m benchmarks.large_bodies [--mib 63] [--rounds 3] [--loop asyncio] [--alias] [--own-name] [--json]

The data path runs in this process, on a loop on which nothing else is done; the client and the endpoint are another
process. A callback that comes round once in each turn of the loop takes the time: `cpu` is what the loop's thread
computed in that turn, `wall` also what the machine gave to others, so that only `cpu` counts where it is not idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import orjson

from lbproxy.control.telemetry.memory import Memory
from lbproxy.processes.process import settle
from tests.support.rig import post, rig

MIB: Final = 1 << 20
READ_BYTES: Final = 1 << 18
GIVE_UP_S: Final = 120.0
OK: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
FORM: Final = (
    "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    "Content-Length: {}\r\n\r\n"
)


class Turn(NamedTuple):
    """The longest, in milliseconds."""

    cpu_ms: float
    wall_ms: float
    turns: int
    """In all."""
    status: int


def image(size: int, model: str) -> bytes:
    """One image in base64."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBOR" * (size // 5)}}
    return post(orjson.dumps({"model": model, "messages": [{"role": "user", "content": [part]}]}))


def prompt(size: int, model: str) -> bytes:
    """One prompt."""
    return post(orjson.dumps({"model": model, "prompt": "all alike " * (size // 10)}), "/v1/completions")


def documents(size: int, model: str) -> bytes:
    """Documents of 20 KB."""
    return post(orjson.dumps({"model": model, "documents": ["x y " * 5000] * (size // 20_002)}), "/v1/rerank")


def tokens(size: int, model: str) -> bytes:
    """300,000 token ids, whatever the size."""
    del size
    return post(b'{"model":"%b","prompt":[' % model.encode() + b"12345," * 300_000 + b"1]}", "/v1/completions")


def messages(size: int, model: str) -> bytes:
    """20,000 messages, whatever the size."""
    del size
    return post(orjson.dumps({"model": model, "messages": [{"role": "user", "content": "hello"}] * 20_000}))


def form(size: int, model: str) -> bytes:
    """A file, and behind it the model."""
    field = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    body = field % (b"file", b'; filename="a.wav"', b"\r\n-b\x00" * (size // 5)) + field % (
        b"model",
        b"",
        model.encode(),
    )
    body += b"--b--\r\n"
    return FORM.format(len(body)).encode() + body


SHAPES: Final[dict[str, Callable[[int, str], bytes]]] = {
    one.__name__: one for one in (image, prompt, documents, tokens, messages, form)
}


class Watch:
    """Comes round once in each turn of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.reset()
        self._round()

    def reset(self) -> None:
        """Begin anew."""
        self._cpu, self._wall = time.thread_time(), time.perf_counter()
        self.cpu_s = self.wall_s = 0.0
        self.turns = 0

    def _round(self) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        self.cpu_s, self.wall_s = max(self.cpu_s, cpu - self._cpu), max(self.wall_s, wall - self._wall)
        self.turns += 1
        self._cpu, self._wall = cpu, wall
        self._loop.call_soon(self._round)


def _read_request(sock: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(READ_BYTES)
    head, _, rest = data.lower().partition(b"\r\n\r\n")
    left = int(head.partition(b"content-length:")[2].split(b"\r\n")[0]) - len(rest)
    while left > 0:
        left -= len(sock.recv(min(left, READ_BYTES)))


def _others(ours: Connection) -> None:
    """The endpoint, which tells its port, and the client, which sends what it is told to."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            sock, _ = listening.accept()
            _read_request(sock)
            sock.sendall(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
            sock.close()

    threading.Thread(target=serve, daemon=True).start()
    ours.send(listening.getsockname()[1])
    while (order := ours.recv()) is not None:
        port, shape, size, model = order
        with socket.create_connection(("127.0.0.1", port), GIVE_UP_S) as sock:
            sock.sendall(SHAPES[shape](size, model))
            answer = sock.recv(READ_BYTES)
        ours.send(int(answer.split(b" ", 2)[1]))


async def measure(
    shapes: list[str], mib: int, rounds: int, *, alias: bool = False, own_name: bool = False
) -> dict[str, Turn]:
    """The worst of the rounds for each shape."""
    loop = asyncio.get_running_loop()
    theirs, ours = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_others, args=(ours,), daemon=True)
    process.start()
    found: dict[str, Turn] = {}
    try:
        url = f"http://127.0.0.1:{theirs.recv()}"
        entry = (url, "models: [m], model: its-own-name") if own_name else url
        more = "limits: {body_rate: 1KiB}" + ("\nmodels: {alias: {to: m}}" if alias else "")
        async with rig(entry, more=more) as it:
            settle()  # collections of garbage and the allocator are those of the product
            Memory.tune()
            watch = Watch(loop)
            for shape in shapes:
                for _ in range(rounds):
                    theirs.send((it.port, shape, mib * MIB, "alias" if alias else "m"))
                    await asyncio.sleep(0)
                    watch.reset()
                    while not theirs.poll():  # noqa: ASYNC110 - the loop goes round in any case
                        await asyncio.sleep(0)
                    turn = Turn(1e3 * watch.cpu_s, 1e3 * watch.wall_s, watch.turns, theirs.recv())
                    found[shape] = max(turn, found.get(shape, turn))
    finally:
        process.terminate()
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="The longest turn of the event loop while a large body passes.")
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--mib", type=int, default=63, help="size of those that have one (default: 63)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the worst is told (default: 3)")
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--alias", action="store_true", help="the model's name is replaced")
    parser.add_argument("--own-name", action="store_true", help="the endpoint has its own name of the model")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    run = asyncio.run
    if args.loop == "uvloop":
        import uvloop  # noqa: PLC0415 - not on every platform

        run = uvloop.run
    found = run(measure(args.shapes, args.mib, args.rounds, alias=args.alias, own_name=args.own_name))
    if args.json:
        json.dump({shape: turn._asdict() for shape, turn in found.items()}, sys.stdout)
        return
    for shape, turn in found.items():
        print(
            f"{shape:10} {turn.status}  longest turn: {turn.cpu_ms:6.1f} ms cpu, {turn.wall_ms:6.1f} ms wall"
            f"  ({turn.turns:,} turns)"
        )


if __name__ == "__main__":
    main()
