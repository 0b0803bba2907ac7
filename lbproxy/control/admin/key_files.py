# SPDX-License-Identifier: Apache-2.0
"""What stands in files beside the settings: the API keys that clients may have, and lbproxy's own certificate.

Theory of operation. They are read at the start, where what is wrong with them is fatal, and at each reload, which it
makes fail as a whole. Between, each set of files is looked at every second; when one has changed, and then stayed as it
is for a turn (whoever writes it may not be done), the set is read anew. Invariants:

- What cannot be read or is not valid changes nothing: what held before holds on, and the log says so, once.
- Nothing of what is in the files is in any message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from lbproxy.config.sections.access import AuthSettings, TlsSettings, read_key_file
from lbproxy.config.text import ConfigError
from lbproxy.config.tree import Settings
from lbproxy.control.families.common import Loads

logger = logging.getLogger("lbproxy")

LOOK_EVERY_S = 1.0
MAX_FILE_BYTES = 1 << 20
MAX_PROBLEMS_LOGGED = 100
T = TypeVar("T")


class Credentials(NamedTuple):
    """Everything that was read."""

    keys: dict[bytes, str]
    """What the API key with each SHA-256 digest is called; empty = clients need none."""
    tls: ssl.SSLContext | None


def read_credentials(settings: Settings) -> Credentials:
    """Read all that the settings name. Blocks. Raises ConfigError with everything that is wrong."""
    problems: list[str] = []
    keys: dict[bytes, str] = {}
    tls = None
    try:
        keys = read_keys(settings.auth)
    except ConfigError as error:
        problems += error.problems
    try:
        tls = None if settings.listen.tls is None else read_certificate(settings.listen.tls)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError("files that the settings name", problems)
    return Credentials(keys, tls)


def read_keys(auth: AuthSettings) -> dict[bytes, str]:
    """The API keys in the settings and in their file. Blocks. Raises ConfigError."""
    keys = {one.key.digest: one.name for one in auth.keys}
    if auth.file is not None:
        try:
            more = read_key_file(_text(auth.file, "auth.file"), source="auth.file")
        except ConfigError as error:
            raise ConfigError("auth.file", [_placed("auth.file", auth.file, one) for one in error.problems]) from None
        for one in more:
            keys.setdefault(one.key.digest, one.name)
    return keys


def read_certificate(tls: TlsSettings) -> ssl.SSLContext:
    """The certificate and its key. Blocks. Raises ConfigError."""
    problems = []
    for name, path, mark in (("cert", tls.cert, "BEGIN CERTIFICATE"), ("key", tls.key, "PRIVATE KEY")):
        try:
            text = _text(path, name)
        except ConfigError as error:
            problems.append(_placed(f"listen.tls.{name}", path, error.problems[0]))
            continue
        if mark not in text:
            problems.append(_placed(f"listen.tls.{name}", path, f"expected PEM with {mark}"))
        elif "ENCRYPTED" in text:
            problems.append(_placed(f"listen.tls.{name}", path, "expected a key without a passphrase"))
    if not problems:
        try:
            return server_context(tls.cert, tls.key)
        except OSError as error:
            why = getattr(error, "reason", None) or error.strerror or "unreadable"
            problems.append(f"listen.tls: {tls.cert} and {tls.key} are no pair that can be used: {why}")
    raise ConfigError("listen.tls", problems)


def _placed(key: str, path: str, problem: str) -> str:
    return f"{key}: {path}: {problem}"


def _text(path: str, source: str) -> str:
    """A small file. Raises ConfigError with one problem."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe could wait for ever
            raise ConfigError(source, ["expected a file"])
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        why = (error.strerror or "cannot be read").lower()
        where = "" if os.path.isabs(path) else f" in {os.getcwd()}, lbproxy's working directory"
        raise ConfigError(source, [f"{why}{where}"]) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(source, [f"expected at most {MAX_FILE_BYTES >> 20} MiB"])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(source, ["expected UTF-8"]) from None


class Watched:
    """A set of files that something is read from, looked at by `look`."""

    def __init__(self, what: str, paths: Sequence[str], read: Callable[[], T], adopt: Callable[[T], None]) -> None:
        """Make it before they are read for the first time. `read` runs in a thread and raises ConfigError."""
        self.what = what
        self._paths = paths
        self._renew = partial(_renew, read, adopt)
        self._taken = self._seen = _marks(paths)

    async def look(self) -> bool:
        """Read them anew if they changed and are at rest. Returns whether they were. Raises ConfigError, once for each
        change, if what they are now cannot be used.
        """
        marks = await asyncio.to_thread(_marks, self._paths)
        at_rest, self._seen = marks == self._seen, marks
        if not at_rest or marks == self._taken:
            return False
        self._taken = marks
        await self._renew()
        return True


async def _renew(read: Callable[[], T], adopt: Callable[[T], None]) -> None:
    adopt(await asyncio.to_thread(read))


class Files:
    """All that is read: `read`, then `adopt`, at the start and at each reload; `follow` between."""

    def __init__(
        self,
        loads: Loads,
        take_keys: Callable[[dict[bytes, str]], None],
        take_tls: Callable[[ssl.SSLContext | None], None],
    ) -> None:
        self._loads = loads
        self._take_keys = take_keys
        self._take_tls = take_tls
        self._watched: Sequence[Watched] = ()

    async def read(self, settings: Settings) -> tuple[Sequence[Watched], Credentials]:
        """What the settings name, for `adopt`; it changes nothing. Raises ConfigError with everything that is wrong."""
        watched = self._watch(settings)  # before they are read: a change in between is seen later
        return watched, await asyncio.to_thread(read_credentials, settings)

    def adopt(self, files: tuple[Sequence[Watched], Credentials]) -> None:
        """It holds from now on."""
        self._watched, credentials = files
        self._take_keys(credentials.keys)
        self._take_tls(credentials.tls)
        self._loads.stale.clear()

    def _watch(self, settings: Settings) -> Sequence[Watched]:
        auth, tls = settings.auth, settings.listen.tls
        watched = []
        if auth.file is not None:
            watched.append(Watched("API keys", [auth.file], partial(read_keys, auth), self._take_keys))
        if tls is not None:
            watched.append(Watched("certificate", [tls.cert, tls.key], partial(read_certificate, tls), self._take_tls))
        return watched

    async def follow(self) -> None:
        """Look at them every second, for ever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for one in self._watched:
                await self._look_at(one)

    async def _look_at(self, files: Watched) -> None:
        try:
            if not await files.look():
                return
        except ConfigError as error:
            self._loads.stale.add(files.what)
            text = "the %s cannot be read again, and the previous contents stay in use: %s"
            extra = {"event": "reload", "problems": list(error.problems[:MAX_PROBLEMS_LOGGED])}
            logger.error(text, files.what, error.problems[0], extra=extra)
        else:
            self._loads.stale.discard(files.what)
            logger.info("%s read again", files.what, extra={"event": "reload"})


def _marks(paths: Sequence[str]) -> list[tuple[int, ...] | int | None]:
    """What changes when a file does, or another stands in its place: Kubernetes changes where a link leads."""
    marks: list[tuple[int, ...] | int | None] = []
    for path in paths:
        try:
            now = os.stat(path)
        except OSError as error:
            marks.append(error.errno)
        else:
            marks.append((now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns))
    return marks


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and 1.3 with the chain and the key in two PEM files, which are read here and not
    again.

    A reload makes a new context: one that failed to load half of a new pair would be unusable. Ciphers are OpenSSL's as
    Python chooses them: forward secrecy only, no compression, no renegotiation. Raises OSError, also for invalid
    contents (ssl.SSLError).
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, password=lambda: b"")  # without this, OpenSSL prompts on the terminal
    return context
