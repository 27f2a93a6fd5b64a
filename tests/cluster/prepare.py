"""Makes what tests/cluster needs, before they run: Debian packages, Go, Kubernetes, the images.

scripts/test runs it beside the other tests: `python -m cluster.prepare` with tests/ on the path. It
ends with CANNOT where no cluster can run on this machine, its last line saying why: that is tried
with a cluster that has nothing of ours in it. Any other failure is one of ours. All of it is
repeatable, and quick where it was done before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from cluster import built_images
from cluster.harness import debian, golang, layout, programs

CANNOT = 3
NEEDED_GIB = 20
"""Programs, images and Go's caches, when nothing is there yet."""


def main() -> int:
    """The exit code."""
    os.setpgid(0, 0)  # so that scripts/test can end it with all that it has started
    layout.cache_dir().mkdir(parents=True, exist_ok=True)
    if reason := debian.unfit() or _not_to_be_had():
        print(reason)
        return CANNOT
    if reason := _not_to_be_built() or _does_not_run():
        print(reason)
        return CANNOT
    built_images.build_all()
    return 0


def _not_to_be_built() -> str:
    """Why not: a module that a registry refuses after all, or a compiler that this machine ends.

    The sources and their versions are not ours and don't change by themselves.
    """
    try:
        programs.build()
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return " ".join(f"Kubernetes can't be built here, as said above: {error}".split())
    return ""


def _does_not_run() -> str:
    """Why a bare cluster or an image without anything of ours can't be had; '': both can."""
    for words in (["image-base"], ["up", "--nodes", "1"]):
        done = _trial(*words)
        if done.returncode != 0 and _trial(*words).returncode != 0:
            said = (done.stdout + done.stderr).strip()
            print(said)
            last = (said.splitlines() or ["it said nothing"])[-1]
            return f"`scripts/cluster {' '.join(words)}` does not work on this machine: {last}"
    _trial("down")
    return ""


def _trial(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*layout.module("__main__"), *words],
        env=layout.module_env() | {"BACKSTAY_CLUSTER_NAME": "trial"},
        capture_output=True,
        text=True,
    )


def _not_to_be_had() -> str:
    """Why not, when this machine could run a cluster but its parts can't be fetched."""
    if not programs.outdated() and not debian.missing():
        return ""
    free = shutil.disk_usage(layout.cache_dir()).free >> 30
    if free < NEEDED_GIB:
        return f"{layout.cache_dir()} has {free} GiB free, the first build needs {NEEDED_GIB}"
    try:
        debian.install()
        golang.check_modules()
    except RuntimeError as error:
        return " ".join(str(error).split())
    return ""


if __name__ == "__main__":
    sys.exit(main())
