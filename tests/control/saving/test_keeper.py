# SPDX-License-Identifier: Apache-2.0
"""The state file: written atomically and by one process, read at the start; whatever is wrong with it is a warning."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from lbproxy.config.sections.routing import StateSettings
from lbproxy.control.families.common import StateStats
from lbproxy.control.saving import keeper as keeping
from lbproxy.control.saving.keeper import Keeper
from lbproxy.control.saving.state_file import LockedError, StateFile, problem, read
from lbproxy.core.balancer import Balancer
from lbproxy.core.saved.reading import read_lines
from tests.core.saved.test_limits_saved import balancer_of, lines_of, provider, saved_by, use, used
from tests.core.saved.test_saved import ask, experienced, prompt
from tests.support.aio import run, until
from tests.support.pool import make_balancer, pool_of


class Kept:
    """A balancer with its keeper."""

    def __init__(self, file: Path | None, balancer: Balancer | None = None, *, prefixes: bool = True) -> None:
        self.stats = StateStats()
        self.balancer = balancer or pool_of(1, policy="adaptive")[0]
        self.now = 0.0
        settings = StateSettings(file=None if file is None else str(file), prefixes=prefixes)
        self.keeper = Keeper(self.balancer, settings, self.stats, lambda: self.now)

    def knows_prompts(self) -> bool:
        return ask(self.balancer, prompt(39_000), now=1.0) > 0.0


def wrote(file: Path) -> None:
    """An experienced lbproxy that ended."""
    kept = Kept(file, experienced())
    run(kept.keeper.stop())
    assert kept.stats.writes == {"written": 1, "failed": 0, "locked": 0}
    assert kept.stats.bytes == file.stat().st_size


def test_what_one_process_learned_the_next_one_knows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lbproxy")
    file = tmp_path / "state"
    wrote(file)
    kept = Kept(file)
    run(kept.keeper.restore())
    assert kept.knows_prompts()
    assert kept.stats.age_at_start_s is not None
    assert "restored 1 endpoints and 40 prompts" in caplog.text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "hashes of prompts are nobody else's"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["state", "state.lock"]


def test_that_the_file_cannot_be_written_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not first at the stop, when what was learned is lost."""
    kept = Kept(tmp_path / "none" / "state")
    run(kept.keeper.restore())
    assert f"cannot be written: there is no folder {tmp_path}/none" in caplog.text
    caplog.clear()
    run(Kept(tmp_path / "state").keeper.restore())
    assert "cannot be written" not in caplog.text


def test_a_relative_path_is_said_in_full() -> None:
    assert problem("none/state") == f"there is no folder {Path.cwd()}/none"


def test_without_prefixes(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "state", experienced(), prefixes=False)
    run(kept.keeper.stop())
    after = Kept(tmp_path / "state")
    run(after.keeper.restore())
    assert not after.knows_prompts()
    assert after.stats.age_at_start_s is not None


def test_no_file_is_configured() -> None:
    kept = Kept(None)

    async def main() -> None:
        await kept.keeper.restore()
        await kept.keeper.write()
        await kept.keeper.stop()

    run(main())
    assert not any(kept.stats.writes.values())


def test_a_policy_that_learns_nothing_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "state"
    wrote(file)
    lines = file.read_bytes().splitlines(keepends=True)
    before = b"".join(line for line in lines if b'"kind":"tokens"' not in line)  # of these it keeps some
    file.write_bytes(before)
    kept = Kept(file, pool_of(1, policy="least-request")[0])

    async def main() -> None:
        await kept.keeper.restore()
        await kept.keeper.stop()

    run(main())
    assert file.read_bytes() == before
    assert not any(kept.stats.writes.values())


# Limits


def limited(*, tokens: int = 0) -> Balancer:
    """A balancer that learns nothing, and has a provider with a budget."""
    balancer = balancer_of(provider())
    if tokens:
        use(balancer, tokens, now=0.0)
    return balancer


def wrote_limits(file: Path, tokens: int) -> None:
    kept = Kept(file, limited(tokens=tokens))
    run(kept.keeper.stop())
    assert kept.stats.writes["written"] == 1


def test_what_was_used_of_limits_is_written_whatever_the_policy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lbproxy")
    wrote_limits(tmp_path / "state", 500_000)
    kept = Kept(tmp_path / "state", limited())
    run(kept.keeper.restore())
    assert used(kept.balancer, now=0.0)["tokens_per_day"] == pytest.approx(0.5)
    assert kept.stats.age_at_start_s is not None
    assert "restored what 1 endpoints and 0 flows used of their limits" in caplog.text


def test_what_another_replica_tells_is_not_this_ones_use(tmp_path: Path) -> None:
    """Each counts its own requests: its own file has that, and the other one what was learned."""
    wrote_limits(tmp_path / "state", 500_000)
    teller = make_balancer(policy="adaptive")
    teller.set_endpoints([provider()], now=0.0)
    use(teller, 900_000, now=0.0)
    for own_file, expected in ((tmp_path / "state", 0.5), (None, 0.0)):
        kept = Kept(own_file, balancer_of(provider(), policy="adaptive"))
        run(kept.keeper.restore(saved_by(teller, now=1.0)))
        assert used(kept.balancer, now=0.0)["tokens_per_day"] == pytest.approx(expected)
        assert kept.stats.age_at_start_s == 0.0


@pytest.mark.parametrize("ahead_s", [None, 0.0, 7200.0])
def test_what_the_process_before_counted_overrules_the_file(ahead_s: float | None, tmp_path: Path) -> None:
    """`ahead_s`: of the file's clock. None: there is no file."""
    file = tmp_path / "state"
    older, newer = (make_balancer(policy="adaptive") for _ in range(2))
    for balancer, tokens in ((older, 100_000), (newer, 500_000)):
        balancer.set_endpoints([provider()], now=0.0)
        use(balancer, tokens, now=0.0)
    if ahead_s is not None:
        file.write_bytes(b"".join(lines_of(older, now=1.0, wall=time.time() + ahead_s)))
    kept, before = Kept(file, balancer_of(provider(), policy="adaptive")), Kept(tmp_path / "none", newer)
    kept.keeper.counted = read_lines(run(before.keeper.count()).splitlines())
    run(kept.keeper.restore())
    assert used(kept.balancer, now=0.0)["tokens_per_day"] == pytest.approx(0.5)


def test_a_clock_that_was_set_back_loses_what_was_learned_and_no_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state"
    old = make_balancer(policy="adaptive")
    old.set_endpoints([provider()], now=0.0)
    use(old, 500_000, now=0.0)
    file.write_bytes(b"".join(lines_of(old, now=1.0, wall=time.time() + 7200.0)))
    kept = Kept(file, balancer_of(provider(), policy="adaptive"))
    run(kept.keeper.restore())
    assert used(kept.balancer, now=0.0)["tokens_per_day"] == pytest.approx(0.5)
    assert "is used for limits alone" in caplog.text
    assert kept.keeper._restoring is None


# A file that cannot be used


def truncated(file: Path) -> None:
    wrote(file)
    file.write_bytes(file.read_bytes()[:-20])


def newer(file: Path) -> None:
    wrote(file)
    file.write_bytes(file.read_bytes().replace(b'"version":2', b'"version":3'))


def old(file: Path) -> None:
    wrote(file)
    data = file.read_bytes()
    at = data.index(b'"saved_at":') + len('"saved_at":')
    file.write_bytes(data[:at] + b"1" + data[at + 1 :].replace(data[at + 1 : at + 4], b"000", 1))


def huge(file: Path) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)


def looping(file: Path) -> None:
    file.symlink_to(file)


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda file: file.write_bytes(b""), "its end is missing"),
    "of another program": (lambda file: file.write_text('{"a": 1}\n'), "not a state file"),
    "no JSON": (lambda file: file.write_text("state:\n"), "damaged"),
    "not UTF-8": (lambda file: file.write_bytes(b'{"kind":"\xff\xfe"}\n'), "damaged"),
    "one long line": (lambda file: file.write_bytes(b"[" * (3 << 20)), "too long"),
    "truncated": (truncated, "end is missing|damaged"),
    "newer": (newer, "has version 3"),
    "old": (old, "hours old"),
    "huge": (huge, "bytes, and at most"),
    "a folder": (Path.mkdir, "no file"),
    "a pipe": (os.mkfifo, "no file"),
    "a link to itself": (looping, "too many"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_file_that_cannot_be_used_is_a_warning(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, why = UNUSABLE[name]
    file = tmp_path / "state"
    make(file)
    kept = Kept(file)
    run(kept.keeper.restore())
    assert not kept.knows_prompts()
    assert kept.stats.age_at_start_s is None
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert record.levelno == logging.WARNING
    assert "starts as new" in record.getMessage()
    assert re.search(why, record.getMessage())


def test_no_file_yet_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lbproxy")
    run(Kept(tmp_path / "state").keeper.restore())
    assert [one.levelname for one in caplog.records] == ["INFO"]


# A file that cannot be written


def in_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "state"


def in_no_folder(tmp_path: Path) -> Path:
    return tmp_path / "none" / "state"


def is_a_folder(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def its_new_version_is_a_folder(tmp_path: Path) -> Path:
    (tmp_path / "state.tmp").mkdir()
    return tmp_path / "state"


def its_new_version_is_a_link(tmp_path: Path) -> Path:
    """Somebody else's, who wants another file to be overwritten."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "state.tmp").symlink_to(tmp_path / "victim")
    return tmp_path / "state"


@pytest.mark.parametrize(
    "make", [in_a_file, in_no_folder, is_a_folder, its_new_version_is_a_folder, its_new_version_is_a_link]
)
def test_a_file_that_cannot_be_written_is_one_warning(
    make: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = make(tmp_path)
    kept = Kept(file, experienced())

    async def main() -> None:
        for _ in range(3):
            await kept.keeper.write()
        await kept.keeper.stop()

    run(main())
    assert kept.stats.writes == {"written": 0, "failed": 4, "locked": 0}
    assert len([one for one in caplog.records if one.levelno >= logging.WARNING]) == 1
    assert not (tmp_path / "victim").exists() or (tmp_path / "victim").read_text() == "precious"


def test_what_is_in_the_way_is_told_beforehand(tmp_path: Path) -> None:
    """By `lbproxy check`."""
    assert problem(str(tmp_path / "state")) is None
    assert problem(str(in_no_folder(tmp_path))) is not None
    assert problem(str(in_a_file(tmp_path))) is not None
    assert problem(str(is_a_folder(tmp_path))) == "it is a folder"


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a full disk does, in the middle."""
    file = tmp_path / "state"
    wrote(file)
    before = file.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    kept = Kept(file, experienced())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        run(kept.keeper.write())
    assert file.read_bytes() == before
    assert not (tmp_path / "state.tmp").exists()
    run(kept.keeper.write())
    assert kept.stats.writes == {"written": 1, "failed": 1, "locked": 0}


# Two processes


def test_only_one_of_two_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "state"
    one, other = Kept(file, experienced()), Kept(file, experienced())

    async def main() -> None:
        await one.keeper.write()
        await other.keeper.write()
        await other.keeper.write()
        assert other.stats.writes == {"written": 0, "failed": 0, "locked": 2}
        one.keeper.release()  # it has handed over
        await other.keeper.write()
        await one.keeper.write()
        await one.keeper.stop()

    run(main())
    assert other.stats.writes["written"] == 1
    assert one.stats.writes == {"written": 1, "failed": 0, "locked": 0}
    assert caplog.text.count(f"is written by process {os.getpid()}") == 1
    other.keeper.release()


def test_the_lock_is_not_inherited(tmp_path: Path) -> None:
    """A successor would hold it against itself."""
    file = StateFile(str(tmp_path / "state"))
    file.begin()
    assert file._lock is not None
    assert not os.get_inheritable(file._lock)
    with pytest.raises(LockedError):
        StateFile(str(tmp_path / "state")).begin()
    file.abort()
    file.release()
    again = StateFile(str(tmp_path / "state"))
    again.begin()
    again.abort()
    again.release()


# Other settings


def test_another_file_after_a_reload(tmp_path: Path) -> None:
    """It is written at once, and not read: lbproxy knows more than that. The old one is another process's to write."""
    kept = Kept(tmp_path / "old", experienced())

    async def main() -> None:
        await kept.keeper.write()
        kept.keeper.reconfigure(StateSettings(file=str(tmp_path / "new")))
        await kept.keeper.write()
        other = Kept(tmp_path / "old", experienced())
        await other.keeper.write()
        assert other.stats.writes["locked"] == 0
        other.keeper.release()
        kept.keeper.reconfigure(StateSettings())
        await kept.keeper.stop()

    run(main())
    assert kept.stats.writes == {"written": 2, "failed": 0, "locked": 0}
    assert len(read(str(tmp_path / "new")).keys) == 40


def test_a_reload_while_the_file_is_written(tmp_path: Path) -> None:
    """That write is finished, and then the old file is released."""
    kept = Kept(tmp_path / "old", experienced())

    async def main() -> None:
        writing = asyncio.create_task(kept.keeper.write())
        await until(kept.keeper._busy.locked, every_s=0.0)
        kept.keeper.reconfigure(StateSettings(file=str(tmp_path / "new")))
        await writing
        other = Kept(tmp_path / "old", experienced())
        await other.keeper.write()
        assert other.stats.writes["written"] == 1
        other.keeper.release()
        await kept.keeper.stop()

    run(main())
    assert (tmp_path / "new").exists()


def test_it_is_written_when_it_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "LOOK_EVERY_S", 0.001)
    kept = Kept(tmp_path / "state", experienced())
    written_before: list[int] = []

    async def main() -> None:
        following = asyncio.create_task(kept.keeper.follow())
        for _ in range(20):
            await asyncio.sleep(0.001)
        written_before.append(kept.stats.writes["written"])
        kept.now = 30.0
        await until(lambda: kept.stats.writes["written"])
        kept.now = 59.0
        for _ in range(20):
            await asyncio.sleep(0.001)
        following.cancel()

    run(main())
    assert (written_before, kept.stats.writes["written"]) == ([0], 1)


# The event loop


def large(prompts: int) -> Balancer:
    balancer, _ = pool_of(1, policy="adaptive")
    cache = next(iter(balancer._endpoints.members())).load.kv.cache
    for number in range(prompts):
        cache.unpin(cache.pin((number, -1 - number & (1 << 64) - 1))[1])
    return balancer


def test_a_large_index_is_written_in_many_turns_of_the_loop(tmp_path: Path) -> None:
    """Requests are served between them. How long a turn takes, `python -m benchmarks.restart --cost` measures."""
    kept = Kept(tmp_path / "state", large(20_000))
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    async def main(body: Coroutine[object, object, None]) -> None:
        counting = asyncio.create_task(count())
        await body
        counting.cancel()

    run(main(kept.keeper.write_now()))
    assert kept.stats.writes["written"] == 1
    assert len(turns) > 20
    turns.clear()
    after = Kept(tmp_path / "state")
    run(main(after.keeper.restore()))
    assert len(turns) > 5
    assert len(read(str(tmp_path / "state")).keys) == 20_000


def test_a_disk_that_does_not_respond_holds_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A time limit around a thread ends the wait for it, and then its clean-up waited for the same disk."""
    file = tmp_path / "state"
    os.mkfifo(f"{file}.tmp")  # opening it to write waits for a reader
    monkeypatch.setattr(keeping, "WRITE_WITHIN_S", 0.2)
    kept = Kept(file, experienced())

    async def main() -> None:
        began_at = time.monotonic()
        await kept.keeper.write_now()
        assert time.monotonic() - began_at < 3.0
        await kept.keeper.write()  # not a second one beside it
        assert time.monotonic() - began_at < 3.0
        assert kept.stats.writes["failed"] == 1
        reader = os.open(f"{file}.tmp", os.O_RDONLY | os.O_NONBLOCK)  # the disk responds again
        await until(lambda: not kept.keeper._hangs, "what hung has ended")
        os.unlink(f"{file}.tmp")
        await kept.keeper.stop()
        os.close(reader)

    run(main())
    assert kept.stats.writes["written"] == 1
    assert "cannot be written within 0.2 s" in caplog.text
    assert "the disk does not respond" in caplog.text
