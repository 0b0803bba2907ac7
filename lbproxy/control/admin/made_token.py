# SPDX-License-Identifier: Apache-2.0
"""The token that lbproxy makes for itself where the settings have none, in a file that only its own user can read.

Whoever can read the file may change things: that is the authentication, and the command line finds it by the name that
/admin/state tells (`token_file`). The file lies in the first folder that takes it of $RUNTIME_DIRECTORY,
$XDG_RUNTIME_DIR and the state file's. Invariants:

- It is written under another name and moved to its own, complete and with its mode, in place of whatever is there: no
  link is followed, neither on writing nor on reading.
- It is locked for as long as its process lives. One that is locked is that of the process before this one, of which
  this one has the sockets: its token goes on. One that is not is a dead process's, whose port others may have had.
- A process removes its own file only, never that of a successor.

Nothing here but reads and writes of small files, which may block: off the event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from urllib.parse import quote

FOLDER = "RUNTIME_DIRECTORY"
"""The variable with the best folder, as systemd sets it."""
_TOKEN = re.compile(rb"[A-Za-z0-9_-]{43}")


def file_name(port: int) -> str:
    """Of the token of the admin listener on this port."""
    return f"lbproxy-{port}.token"


def dashboard_link(url: str, token: str | None) -> str:
    """The dashboard of the admin listener at `url`. What is after the # stays with the browser."""
    return f"{url}/dashboard" + ("" if token is None else f"#token={quote(token, safe='')}")


def folders(environ: Mapping[str, str], state_file: str | None) -> list[str]:
    """Where small files of a running process may lie, the best first. `state_file`: the path of one; None = none."""
    runtime = environ.get(FOLDER, "").partition(":")[0]  # systemd names all of a unit's
    named = [runtime, environ.get("XDG_RUNTIME_DIR", ""), os.path.dirname(os.path.abspath(state_file or "/"))]
    return [one for one in named if os.path.isabs(one) and one != "/"]


def read_token(path: str) -> str:
    """The token in a file. Raises OSError, whose text says why it is none that one may trust."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _read(descriptor, {0, os.fstat(descriptor).st_uid})
    finally:
        os.close(descriptor)


def _read(descriptor: int, readers: set[int]) -> str:
    """`readers`: the users that may trust it."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError("it is not a regular file")
    if stat.S_IMODE(facts.st_mode) != 0o600:
        raise OSError(f"its mode is {stat.S_IMODE(facts.st_mode):04o}, not 0600")
    if os.geteuid() not in readers:
        raise OSError("it is another user's")
    text = os.read(descriptor, 64)
    if _TOKEN.fullmatch(text) is None:
        raise OSError("it has no token")
    return text.decode()


class MadeToken:
    """One token and its file: both None until `make`, and after `remove`."""

    def __init__(self, wanted: Sequence[str] = ()) -> None:
        """`wanted`: folders for the file, the best first."""
        self.path: str | None = None
        self.text: str | None = None
        self._wanted = wanted
        self._descriptor: int | None = None
        """The descriptor of the locked file."""

    def make(self, port: int) -> None:
        """Have a token, if there is none and a folder takes it: `path` says whether one did."""
        if self.path is not None:
            return
        for folder in self._wanted:
            with contextlib.suppress(OSError):
                self._write(os.path.join(folder, file_name(port)))
                return

    def remove(self) -> None:
        """The token is not valid any more."""
        path, descriptor = self.path, self._descriptor
        self.path, self.text, self._descriptor = None, None, None
        if path is None or descriptor is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                os.unlink(path)
        os.close(descriptor)

    def _write(self, path: str) -> None:
        text = _of_a_living(path) or secrets.token_urlsafe(32)
        beside = f"{path}.{secrets.token_hex(8)}"
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, 0o600)  # whatever the umask
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, text.encode())
            os.rename(beside, path)
        except OSError:
            os.close(descriptor)
            os.unlink(beside)
            raise
        self.path, self.text, self._descriptor = path, text, descriptor


def _of_a_living(path: str) -> str | None:
    """The token in the file of a process that lives."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = _read(descriptor, {os.fstat(descriptor).st_uid})
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return text
        finally:
            os.close(descriptor)
    return None
