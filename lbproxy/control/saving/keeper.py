# SPDX-License-Identifier: Apache-2.0
"""Keeps what was learned in the state file: reads it at the start, and writes it regularly and at the end.

The export runs on the event loop, as what it reads changes there, in turns of at most `TURN_S` with pauses between; the
file is written in a thread. Whatever goes wrong with the file is a warning: lbproxy then starts as new, or goes on
without it. A warning is logged once until something else happens.

Of two processes only one writes, the one with the lock (`control.saving.state_file`). At a hot restart the old process
writes before it starts its successor, which reads that before it accepts; once it has handed over it only adds to the
file of usage what its last requests use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, TypeVarTuple

from lbproxy.config.sections.routing import StateSettings
from lbproxy.control.families.common import StateStats
from lbproxy.control.saving.state_file import LockedError, StateFile, problem, read
from lbproxy.control.saving.usage_file import append_usage, once, read_usage, usage_path
from lbproxy.core.balancer import Balancer
from lbproxy.core.requests.request import DayUse
from lbproxy.core.saved.reading import Saved, SavedError, encode
from lbproxy.core.saved.restoring import Restoring

logger = logging.getLogger("lbproxy")
T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

TURN_S: Final = 0.002
"""How long an export or a restoration holds up the event loop at one time."""
PAUSES: Final = 9.0
"""Times that between two such turns: an export takes at most a tenth of the processor."""
CHUNK_BYTES: Final = 1 << 18
READ_WITHIN_S: Final = 10.0
"""A start does not wait longer for the file."""
ABORT_WITHIN_S: Final = 1.0
WRITE_WITHIN_S: Final = 10.0
"""A stop and a hot restart do not wait longer either."""
LOOK_EVERY_S: Final = 1.0


class Keeper:
    """`restore` at the start, `follow` as a loop, `stop` at the end."""

    def __init__(
        self, balancer: Balancer, settings: StateSettings, stats: StateStats, now: Callable[[], float]
    ) -> None:
        self._balancer = balancer
        self._settings = settings
        self._stats = stats
        self._now = now
        self._file = None if settings.file is None else StateFile(settings.file)
        self._left = ""
        """The file of usage, once another process writes the state file."""
        self._restoring: Restoring | None = None
        self._due_at = now() + settings.interval
        self._busy = asyncio.Lock()
        """Held while the file is written."""
        self._call: asyncio.Future[Any] | None = None
        """The last call in a thread. It may outlive whoever waited for it, where a disk does not respond."""
        self._complaint = ""
        """The last warning, which is not repeated."""
        self._pauses = PAUSES
        self._saved_days: list[DayUse] = []
        """What was found at the start of who used how many tokens."""
        self.counted: Saved | None = None
        """What was used of limits, as known by the process before this one: newer than what is in the file."""
        self.has_predecessor = False
        """Another process finishes its requests, and counts them."""

    # The start

    async def restore(self, told: Saved | None = None) -> None:
        """Read the file, if there is one, and give the balancer what is in it. If another replica `told` what it has
        learned now, only what was used of limits is taken from the file: replicas tell that in another way.
        """
        self._turn()
        found = await self._read()
        await self._look()
        if (counted := self.counted) is not None and counted.tokens:
            self._saved_days = list(counted.tokens.values())
        self._balancer.ledger.resume(self._saved_days, still_count=self.has_predecessor)
        if (counted := self.counted) is not None:
            if found is not None:
                found[0].forget_limits()
            await self._adopt(counted, max(0.0, time.time() - counted.saved_at))
        if told is not None:
            if found is not None:
                await self._adopt(found[0].limits_alone(), found[1])
            told.forget_limits()
            found = told, 0.0
        if found is not None:
            await self._adopt(*found)

    async def _read(self) -> tuple[Saved, float] | None:
        """What is in the file, and its age. None: there is none, or it cannot be used."""
        path = self._settings.file
        if path is None:
            return None
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                saved = await asyncio.to_thread(read, path)
            self._saved_days = list(saved.tokens.values())  # of whatever age
            return self._usable(saved)
        except FileNotFoundError:
            logger.info("state: there is no file %s yet", path, extra={"event": "state"})
        except TimeoutError:
            self._warn(f"cannot be read within {READ_WITHIN_S:g} s, so lbproxy starts as new")
        except (SavedError, OSError) as error:
            self._warn(f"cannot be used, so lbproxy starts as new: {_why(error)}")
        return None

    async def _look(self) -> None:
        """Say now, and not first at the stop, that the file cannot be written."""
        path = self._settings.file
        if path is None or self._complaint:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_WITHIN_S):
                if (why := await asyncio.to_thread(problem, path)) is not None:
                    self._warn(f"cannot be written: {why}")

    def _usable(self, saved: Saved) -> tuple[Saved, float]:
        """What may be used now, and its age. Raises SavedError: nothing."""
        wall_now = time.time()
        try:
            return saved, saved.age_s(wall_now)
        except SavedError as error:
            if not (saved.has_limits and saved.is_from_future(wall_now)):
                raise
            self._warn(f"is used for limits alone, as if it had been written just now: {_why(error)}")
            return saved.limits_alone(), 0.0

    async def _adopt(self, saved: Saved, age_s: float) -> None:
        limited, extra = (len(saved.used), len(saved.flows)), {"event": "state", "age_s": round(age_s, 3)}
        self._restoring = restoring = self._balancer.restarts.restore(saved, age_s=age_s, now=self._now())
        await self._restore_prefixes(pauses=0.0)
        if restoring is not None:
            text = "state: restored %d endpoints and %d prompts, saved %.1f s ago"
            logger.info(text, restoring.endpoints, restoring.prompts, age_s, extra=extra)
        if any(limited):
            text = "state: restored what %d endpoints and %d flows used of their limits, saved %.1f s ago"
            logger.info(text, *limited, age_s, extra=extra)
        if restoring is not None or any(limited):
            self._stats.age_at_start_s = age_s

    async def _restore_prefixes(self, *, pauses: float) -> None:
        """Also those of endpoints that joined since."""
        restoring, began_at = self._restoring, time.monotonic()
        if restoring is None:
            return
        while restoring.step():
            if time.monotonic() - began_at > TURN_S:
                await asyncio.sleep(pauses * TURN_S)
                began_at = time.monotonic()
        if restoring.is_over(self._now()):
            self._restoring = None

    # Between

    async def count(self) -> bytes:
        """What was used of limits, as in a file, for `counted` of another keeper. Empty: there are none."""
        lines: list[bytes] = []
        self._turn()
        began_at = time.monotonic()
        for piece in self._balancer.restarts.save_limits(
            saved_at=time.time(), now=self._now(), days=self._balancer.ledger.days()
        ):
            if piece is not None:
                lines.append(encode(piece))
            if time.monotonic() - began_at > TURN_S:
                await asyncio.sleep(PAUSES * TURN_S)
                began_at = time.monotonic()
        return b"".join(lines)

    async def follow(self) -> None:
        """Until cancelled: a loop for `supervise`."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await self._restore_prefixes(pauses=PAUSES)
            self._turn()
            if self._now() >= self._due_at:
                await self.write()

    def _turn(self) -> None:
        self._balancer.ledger.turn(time.strftime("%Y-%m-%d", time.gmtime()), secrets.token_hex(8))

    async def usage(self) -> tuple[bool, list[DayUse]]:
        """Whether a file keeps who used how many tokens; and all of it, with the present day. Raises OSError."""
        path = self._settings.file
        kept = [] if path is None else await asyncio.to_thread(read_usage, usage_path(path))
        self._turn()
        return path is not None, once([*kept, *self._balancer.ledger.days()])

    def reconfigure(self, settings: StateSettings) -> None:
        """Use other settings. What is in a new file is not read, as lbproxy knows more than that."""
        before, self._settings = self._settings, settings
        if settings.file != before.file:
            if self._file is not None and not self._busy.locked():
                self._file.release()
            self._file = None if settings.file is None else StateFile(settings.file)
            self._due_at = self._now()
        self._due_at = min(self._due_at, self._now() + settings.interval)

    async def write_now(self) -> None:
        """Write the file without pauses, as somebody waits for it."""
        self._pauses = 0.0
        try:
            async with asyncio.timeout(WRITE_WITHIN_S):
                await self.write()
        except TimeoutError:
            self._warn(f"cannot be written within {WRITE_WITHIN_S:g} s")
        finally:
            self._pauses = PAUSES

    async def write(self) -> None:
        """Write the file. Problems are logged and counted."""
        async with self._busy:
            file = self._file
            self._due_at = self._now() + self._settings.interval
            if file is None and not self._left:
                return
            if self._hangs:
                self._count("failed")
                self._warn("cannot be written: the disk does not respond")
                return
            try:
                size = await (self._leave() if file is None else self._export(file))
            except LockedError as error:
                self._count("locked")
                self._warn(f"is written by {error}, so this one does not write it")
            except OSError as error:
                self._count("failed")
                self._warn(f"cannot be written: {_why(error)}")
            else:
                if size:
                    self._count("written")
                    self._stats.bytes, self._stats.written_at, self._complaint = size, time.time(), ""
                    logger.debug("state: %d bytes written", size, extra={"event": "state", "bytes": size})
            finally:
                if file is not None and not self._hangs:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_WITHIN_S):
                            await self._in_thread(file.abort)
                if file is not None and file is not self._file and not self._hangs:  # another one since
                    file.release()

    @property
    def _hangs(self) -> bool:
        """Whether a call that nobody waits for any more still goes on: there is one at a time."""
        return self._call is not None and not self._call.done()

    async def _in_thread(self, call: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """What is called goes on if this is cancelled."""
        self._call = running = asyncio.get_running_loop().run_in_executor(None, call, *arguments)
        running.add_done_callback(_heard)
        return await asyncio.shield(running)

    async def _export(self, file: StateFile) -> int:
        """Returns the size; 0 = there is nothing that is to survive. Raises LockedError, OSError."""
        lines: list[bytes] = []
        self._turn()
        ended = self._balancer.ledger.ended
        if ended:
            await self._in_thread(append_usage, usage_path(file.path), ended)
            self._balancer.ledger.ended = self._balancer.ledger.ended[len(ended) :]
        size, began_at = 0, time.monotonic()
        prefixes = self._settings.prefixes
        for piece in self._balancer.restarts.save(
            saved_at=time.time(), prefixes=prefixes, now=self._now(), days=self._balancer.ledger.days()
        ):
            if not size and not lines:
                await self._in_thread(file.begin)
                began_at = time.monotonic()
            if piece is not None:
                lines.append(encode(piece))
                size += len(lines[-1])
            if time.monotonic() - began_at > TURN_S:
                await asyncio.sleep(self._pauses * TURN_S)
                if sum(map(len, lines)) > CHUNK_BYTES:
                    data, lines = b"".join(lines), []
                    await self._in_thread(file.append, data)
                began_at = time.monotonic()
        if not size:
            return 0
        await self._in_thread(file.append, b"".join(lines))
        return await self._in_thread(file.commit)

    async def _leave(self) -> int:
        """Add what is counted to the usage that the successor's file keeps. Raises OSError."""
        self._turn()
        await self._in_thread(append_usage, self._left, self._balancer.ledger.days())
        return 0

    # The end

    def hand_over(self) -> None:
        """A successor writes the file from now on."""
        file = self._file
        self.release()
        self._left = "" if file is None else usage_path(file.path)

    def release(self) -> None:
        """Write no more."""
        if self._file is not None and not self._busy.locked() and not self._hangs:
            self._file.release()
        self._file, self._left = None, ""

    async def stop(self) -> None:
        """Write the file for the last time."""
        await self.write_now()
        self.release()

    def _count(self, result: str) -> None:
        self._stats.writes[result] += 1

    def _warn(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            logger.warning("state: %s %s", self._settings.file, complaint, extra={"event": "state"})


def _heard(call: asyncio.Future[Any]) -> None:
    """So that nobody complains of a failure that nobody waited for."""
    if not call.cancelled():
        call.exception()


def _why(error: Exception) -> str:
    """In words, without the file's name."""
    return (error.strerror or "unknown error").lower() if isinstance(error, OSError) else str(error)
