# SPDX-License-Identifier: Apache-2.0
"""Runs the image's build and what it makes, without Docker: `python -m release.image dist`.

The commands of the Dockerfile's second stage run in a folder that stands in for the image's root, with the compiled
wheel that `make wheels` put into `dist` in place of the first stage's. What they install then runs with the image's
stop signal, health check and user, where this process may change its user and that one may read this Python. What this
cannot show: the base image, and the layers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lbproxy import __version__
from release.install import exercise
from release.wheels import ROOT, run
from tests.support.compose import image_healthcheck, stages

INSTALLED = "/opt/lbproxy"
"""The folder that the final image copies."""


def build(wheels: Path, root: Path) -> Path:
    """The second stage, into `root`; returns the environment that it makes."""
    made = root / INSTALLED.removeprefix("/")
    made.parent.mkdir()
    for lock in ROOT.glob("requirements*.lock"):
        (root / lock.name).symlink_to(lock)
    environ = {**os.environ, "EXTRAS": "", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for step in (one for one in stages()[1] if one.name == "RUN"):
        script = step.text.replace(INSTALLED, str(made)).replace("/wheels/*.whl", f"{wheels.absolute()}/*.whl")
        run("sh", "-euc", script, cwd=root, env=environ)
    return made


def image_user(python: Path) -> list[str]:
    """What a command begins with to run as the image's USER; empty where that is not possible."""
    (user,) = (one.text for one in stages()[-1] if one.name == "USER")
    uid, gid = user.split(":")
    prefix = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--bounding-set=-all"]
    try:
        subprocess.run([*prefix, python, "-c", ""], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return []
    return prefix


def check_health(root: Path, command: Sequence[str], env: dict[str, str], python: Path) -> None:
    """Start it on the image's ports; its health check must fail before, and succeed once it listens."""
    check = [str(python), *image_healthcheck()[1:]]
    assert subprocess.run(check, env=env, capture_output=True, check=False, timeout=60).returncode != 0, (
        "it runs already"
    )
    config = root / "lbproxy.yaml"
    config.write_text("listen: 127.0.0.1:0\ndrain: {lame_duck: 0s}\nendpoints: ['http://127.0.0.1:9']\n")
    process = subprocess.Popen([*command, "--config", str(config)], env=env, stdout=subprocess.DEVNULL)
    try:
        for _ in range(60):
            healthy = subprocess.run(check, env=env, capture_output=True, check=False, timeout=60).returncode == 0
            if healthy or process.poll() is not None:
                break
            time.sleep(0.5)
        assert healthy, "the health check fails"
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """The command line."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (wheel,) = Path(sys.argv[1]).glob(f"lbproxy-{__version__}-{tag}-*.whl")
    with tempfile.TemporaryDirectory(prefix="lbproxy-image-") as name:
        root = Path(name)
        root.chmod(0o777)  # the image's user writes the test's settings
        alone = root / "wheels"
        alone.mkdir()
        (alone / wheel.name).symlink_to(wheel.absolute())
        made = build(alone, root)
        files = [path for path in made.rglob("*") if path.is_file() and not path.is_symlink()]
        size = sum(path.stat().st_size for path in files)
        names = {path.name for path in (made / "lib").glob("python*/site-packages/*")}
        assert not {"pip", "setuptools"} & names, "what is not needed to run is in the image"
        user = image_user(made / "bin/python")
        command = [*user, str(made / "bin/lbproxy")]
        env = {"PATH": f"{made / 'bin'}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
        if library := sysconfig.get_config_var("LIBDIR"):
            env["LD_LIBRARY_PATH"] = library
        exercise(command, env, root, version=f"{__version__} (compiled)")
        check_health(root, command, env, made / "bin/python")
    how = " ".join(user) or "nothing: as this user"
    print(f"{INSTALLED}: {len(files)} files, {size / 1e6:.0f} MB; it runs with {how}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
