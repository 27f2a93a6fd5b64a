"""What the cluster needs from Debian, and why it can't run on a machine that can't have it.

`build` and `up` install what is missing; the tests ask `unfit` first and skip with its answer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.harness import golang, linux

# A program, or a file, of each package tells whether it is installed.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iproute2": "ip",
    "nftables": "nft",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "gcc": "gcc",
    "libc6-dev": "/usr/include/stdio.h",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
}


def missing() -> list[str]:
    """Packages that are not installed."""
    return [package for package, proof in PACKAGES.items() if not shutil.which(proof)
            and not (proof.startswith("/") and Path(proof).exists())]  # fmt: skip


def unfit() -> str:
    """Why no cluster can run here, in one line; empty if one can."""
    if sys.platform != "linux":
        return "the cluster tests need Linux"
    if os.geteuid() != 0:
        return "the cluster tests need root (they make namespaces, cgroups and mounts)"
    try:
        linux.hierarchies()
    except (OSError, RuntimeError) as error:
        return f"the cluster tests can't run here: {error}"
    if reason := golang.unfit():
        return f"the cluster tests build Kubernetes: {reason}"
    if missing() and not shutil.which("apt-get"):
        return f"the cluster tests need {', '.join(missing())}, and there is no apt-get here"
    return ""


def install() -> None:
    """Install what is missing; the package lists are fetched only if they are too old or absent."""
    packages = missing()
    if not packages:
        return
    print(f"installing Debian packages: {' '.join(packages)}", file=sys.stderr, flush=True)
    if not _apt("install", *packages):
        if not _apt("update"):
            raise RuntimeError("apt-get update failed")
        if not _apt("install", *packages):
            raise RuntimeError(f"apt-get can't install {' '.join(packages)}")


def _apt(command: str, *packages: str) -> bool:
    argv = ["apt-get", "-qq", "-y", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120"]
    options = ["--no-install-recommends"] if packages else []
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        [*argv, command, *options, *packages],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        print(done.stderr.strip(), file=sys.stderr, flush=True)
    return done.returncode == 0
