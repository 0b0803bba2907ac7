# SPDX-License-Identifier: Apache-2.0
"""Unix sockets: listening on a path, reaching an endpoint at one, and handing one over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest

from lbproxy.config.sections.clients import Address
from lbproxy.core.requests.retry import FailureKind, UpstreamError
from lbproxy.net.connections.fetch import fetch
from lbproxy.net.connections.pool import ConnectionPool
from lbproxy.net.dialing.origin import Origin
from lbproxy.net.dialing.vanished import find_vanished
from lbproxy.net.listening.bind import bind_unix, bound_port, open_sockets
from lbproxy.net.listening.inherit import Inherited
from tests.support.aio import run
from tests.support.endpoint import OK, ScriptedEndpoint

# --- Listening --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_the_socket_file_has_the_mode_that_was_asked_for_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        with bind_unix(str(tmp_path / "s"), mode) as sock:
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == mode
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "s"))
            assert bound_port([sock]) == 0
    finally:
        os.umask(before)


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    """What a killed process leaves behind must not need a hand."""
    path = str(tmp_path / "s")
    bind_unix(path, 0o660).close()
    assert os.path.exists(path)
    with bind_unix(path, 0o660), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_a_live_socket_is_refused_and_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with bind_unix(path, 0o660) as first:
        with pytest.raises(OSError, match="another process listens there"):
            bind_unix(path, 0o660)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            first.accept()[0].close()


def test_a_live_socket_whose_queue_is_full_is_refused(tmp_path: Path) -> None:
    """A process that is stopped for a moment still has its socket."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as clients:
        busy.bind(path)
        busy.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(4):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(path)
        with pytest.raises(OSError, match="another process listens there"):
            bind_unix(path, 0o660)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(OSError, match="a file that is no socket is there"):
        bind_unix(str(path), 0o660)
    assert path.read_text() == "precious"


def test_the_error_says_which_setting_to_change(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(OSError, match=r"^cannot listen on unix:\S+/none/s \(admin\): no such file or directory$"):
            await open_sockets(Address(unix=str(tmp_path / "none" / "s")), "admin")
        (tmp_path / "s").touch()
        with pytest.raises(OSError, match=r"^cannot listen on unix:\S+/s \(listen\): a file that is no socket is"):
            await open_sockets(Address(unix=str(tmp_path / "s")), "listen")

    run(main())


def test_tcp_options_are_for_tcp(tmp_path: Path) -> None:
    with bind_unix(str(tmp_path / "s"), 0o660) as sock:
        find_vanished(sock, 1.0)


# --- Handing over -----------------------------------------------------------------------------------------------------


def test_an_inherited_socket_is_taken_by_its_path(tmp_path: Path) -> None:
    async def main() -> None:
        one, two = str(tmp_path / "1"), str(tmp_path / "2")
        inherited = Inherited([("listen", bind_unix(one, 0o660)), ("", bind_unix(two, 0o660))])
        assert await inherited.take("listen", Address(host="127.0.0.1", port=80)) == []
        assert await inherited.take("admin", Address(unix=one)) == [], "it was for another setting"
        (listen,) = await inherited.take("listen", Address(unix=one))
        (admin,) = await inherited.take("admin", Address(unix=two))
        assert (listen.getsockname(), admin.getsockname()) == (one, two)
        listen.close()
        admin.close()

    run(main())


@pytest.mark.parametrize("restart", [True, False], ids=["SIGUSR2", "systemd"])
def test_another_mode_holds_after_a_restart_but_systemd_s_is_systemd_s(tmp_path: Path, restart: bool) -> None:
    async def main() -> None:
        path = tmp_path / "s"
        reading, writing = os.pipe()
        inherited = Inherited([("listen", bind_unix(str(path), 0o600))], writing if restart else None)
        (sock,) = await inherited.take("listen", Address(unix=str(path), mode="0666"))
        assert stat.S_IMODE(path.stat().st_mode) == (0o666 if restart else 0o600)
        sock.close()
        inherited.close()
        os.close(reading)
        if not restart:
            os.close(writing)

    run(main())


def test_an_inherited_socket_whose_file_was_removed_is_not_taken(tmp_path: Path) -> None:
    """No client reaches it any more; the restart opens another one at the path."""

    async def main() -> None:
        path = tmp_path / "s"
        inherited = Inherited([("listen", bind_unix(str(path), 0o600))])
        path.unlink()
        assert await inherited.take("listen", Address(unix=str(path))) == []
        inherited.close()

    run(main())


def test_an_inherited_socket_that_fits_no_setting_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sock = bind_unix(str(tmp_path / "s"), 0o660)
    Inherited([("", sock)]).close()
    assert sock.fileno() == -1
    assert f"unix:{tmp_path}/s (unnamed)" in caplog.text


# --- Endpoints --------------------------------------------------------------------------------------------------------


def test_an_origin_is_a_path() -> None:
    origin = Origin.parse("unix:/run/vllm.sock")
    assert (str(origin), origin.url, origin.host_field) == ("unix:/run/vllm.sock", "unix:/run/vllm.sock", "localhost")
    assert origin.socket_path == "/run/vllm.sock"
    assert Origin.parse("http://h:1").socket_path is None


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_an_endpoint_is_asked_over_its_path_on_a_kept_connection(tmp_path: Path, plain: bool) -> None:
    async def main() -> None:
        pool = ConnectionPool()
        async with ScriptedEndpoint(OK, path=str(tmp_path / "s")) as server:
            origin = Origin.parse(server.url)
            for _ in range(2):
                answer = await fetch(pool, origin, "/health", timeout_s=5, max_bytes=100)
                assert answer.status == 200
            assert [one.field("host") for one in server.requests] == ["localhost", "localhost"]
            assert len(server.wires) == 1
        pool.close()
        await asyncio.sleep(0)

    run(main(), plain=plain)


@pytest.mark.parametrize("listens", [False, True], ids=["no file", "nobody listens"])
def test_an_endpoint_that_is_not_there_is_a_refused_connection(tmp_path: Path, listens: bool) -> None:
    async def main() -> None:
        path = str(tmp_path / "s")
        if listens:
            bind_unix(path, 0o660).close()
        pool = ConnectionPool()
        with pytest.raises(UpstreamError) as raised:
            await pool.connect(Origin.parse(f"unix:{path}"), 1.0)
        why = "Connection refused" if listens else "No such file or directory"
        assert raised.value.kind is FailureKind.CONNECT
        assert raised.value.refused
        assert raised.value.detail == f"unix:{path}: {why}"
        pool.close()

    run(main())


@pytest.mark.parametrize("plain", [False, True], ids=["uvloop", "asyncio"])
def test_an_endpoint_whose_queue_is_full_is_waited_for_but_not_for_ever(tmp_path: Path, plain: bool) -> None:
    """A non-blocking connect fails at once then, and event loops would take that for a connection under way."""

    async def main() -> None:
        path = str(tmp_path / "s")
        pool = ConnectionPool()
        with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as clients:
            server.bind(path)
            server.listen(0)
            first = clients.enter_context(socket.socket(socket.AF_UNIX))
            first.connect(path)
            with pytest.raises(UpstreamError, match=r"no connection within 0\.1 s"):
                await pool.connect(Origin.parse(f"unix:{path}"), 0.1)
            waits = asyncio.create_task(pool.connect(Origin.parse(f"unix:{path}"), 5.0))
            await asyncio.sleep(0.05)
            assert not waits.done()
            server.accept()[0].close()
            (await waits).abort()
        pool.close()
        await asyncio.sleep(0.01)

    run(main(), plain=plain)
