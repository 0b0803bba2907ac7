# SPDX-License-Identifier: Apache-2.0
"""Several lbproxies that accept on one port, as behind a TCP load balancer: the kernel gives each connection to one.

    python -m benchmarks.http_routing.several COUNT SETTINGS PORT [--shared]

`--shared`: with a redis-server of their own, over which they tell each other what they place. Ends with its children.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError


def start_redis(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server without a TCP port, and its URL."""
    path = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        try:
            Redis(unix_socket_path=str(path)).ping()
        except RedisError:
            time.sleep(0.05)
        else:
            return process, f"unix://{path}"
    raise SystemExit("redis-server does not respond")


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
    count, settings, port = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "rb") as nothing:
        if nothing.fileno() != 3:
            os.dup2(nothing.fileno(), 3)
        replicas = ""
        try:
            if "--shared" in sys.argv:
                redis, url = start_redis(Path(folder))
                children.append(redis)
                replicas = f"replicas: {{url: '{url}', name: lb-$n}}\n"
            lbproxies = [start_lbproxy(n, settings, port, replicas.replace("$n", str(n))) for n in range(count)]
            children += lbproxies
            lbproxies[0].wait()
        finally:
            for child in reversed(children):
                child.terminate()
            for child in children:
                child.wait()


if __name__ == "__main__":
    main()
