"""Makes what tests/cluster needs, before they run: Debian packages, Go, Kubernetes, the images.

scripts/test runs it beside the other tests: `python -m cluster.prepare` with tests/ on the path. It
ends with CANNOT where no cluster can run on this machine, its last line saying why; any other
failure is one of ours. All of it is repeatable, and quick where it was done before.
"""

from __future__ import annotations

import os
import shutil
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
    programs.build()
    built_images.build_all()
    return 0


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
