# SPDX-License-Identifier: Apache-2.0
"""Several lbproxies that accept on one port, as behind a TCP load balancer: the kernel gives each connection to one.

    python -m benchmarks.http_routing.several COUNT SETTINGS PORT [--store PROGRAM]

`--store`: with a redis-server or valkey-server of their own, over which they tell each other what they place. Ends with
its children. `admins`, `wait_until_joined` and `ended` are for who started it: they look at the lbproxies.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import orjson
from redis import Redis
from redis.exceptions import RedisError

from benchmarks.overhead.process import StartError

JOINED_S = 30.0
"""Within this time all know of each other, also on a busy machine."""
_ADMIN = re.compile(r"lbproxy \S+ listens on \S+, admin on (http://[\w.:\[\]]+)")
_ENDED = re.compile(rb"^lbproxy_requests_total\{.*\} (\S+)$", re.MULTILINE)


# The running lbproxies


def admins(output: str) -> list[str]:
    """URLs of the admin listeners of the lbproxies that wrote this; of other programs' output, none."""
    return _ADMIN.findall(output)


def wait_until_joined(urls: Sequence[str]) -> None:
    """Wait until each that shares knows of all others. Raises StartError."""
    end = time.monotonic() + JOINED_S
    while not all(_knows(url, len(urls) - 1) for url in urls):
        if time.monotonic() > end:
            raise StartError("the lbproxies do not know of each other")
        time.sleep(0.1)


def _knows(url: str, others: int) -> bool:
    replicas = orjson.loads(_get(f"{url}/admin/state"))["replicas"]
    return replicas is None or (replicas["connected"] and len(replicas["others"]) == others)


def ended(urls: Sequence[str]) -> list[int]:
    """How many requests of each have ended so far. Raises StartError if one is gone."""
    return [round(sum(map(float, _ENDED.findall(_get(f"{url}/metrics"))))) for url in urls]


def _get(url: str) -> bytes:
    try:
        with urlopen(url, timeout=10) as response:
            page: bytes = response.read()
    except OSError as error:
        raise StartError(f"an lbproxy does not respond at {url}: {error}") from None
    return page


# The process that starts them


def start_store(program: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server without a TCP port, and its URL."""
    path = folder / "store.sock"
    command = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        try:
            Redis(unix_socket_path=str(path)).ping()
        except RedisError:
            time.sleep(0.05)
        else:
            return process, f"unix://{path}"
    raise SystemExit(f"{program} does not respond")


def start_lbproxy(number: int, settings: Path, port: int, replicas: str) -> subprocess.Popen[bytes]:
    """One lbproxy on a listening socket of its own at `port`."""
    own = settings.with_name(f"several-{number}.yaml")
    own.write_text(f"{settings.read_text()}\n{replicas}")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(4096)
    # The number of a process that is to inherit a socket is known only in it.
    program = f"""
import os
os.dup2({sock.fileno()}, 3)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "lbproxy", "--config", {str(own)!r}])
"""
    environ = {**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "listen"}
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, pass_fds=(sock.fileno(), 3))
    sock.close()
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("settings", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--store", metavar="PROGRAM")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "rb") as nothing:
        if nothing.fileno() != 3:
            os.dup2(nothing.fileno(), 3)
        replicas = ""
        try:
            if args.store is not None:
                store, url = start_store(args.store, Path(folder))
                children.append(store)
                replicas = f"replicas: {{url: '{url}', name: lb-$n}}\n"
            lbproxies = [
                start_lbproxy(n, args.settings, args.port, replicas.replace("$n", str(n))) for n in range(args.count)
            ]
            children += lbproxies
            lbproxies[0].wait()
        finally:
            for child in reversed(children):
                child.terminate()
            for child in children:
                child.wait()


if __name__ == "__main__":
    main()
