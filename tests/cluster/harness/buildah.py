"""Builds images from Dockerfiles with buildah, with neither a daemon nor a registry.

The base image stands in for python:3.11-slim: Debian bookworm with its own Python 3.11 and
pip. Dockerfiles must take their base image from a build argument.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from cluster.harness import layout

BASE_IMAGE = "backstay.test/python:3.11"
MOST_IMAGES = 80  # with the layers of multi-stage builds; beyond it those that nothing names go
BASE_PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"


def _buildah(*argv: str) -> str:
    store = layout.cache_dir() / "buildah"
    options = [
        "--root",
        f"{store}/root",
        "--runroot",
        f"{store}/run",
        "--storage-driver",
        "overlay",
    ]
    done = subprocess.run(["buildah", *options, *argv], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:  # what the steps of a Dockerfile print is in there
        raise RuntimeError(f"buildah {argv[0]} failed:\n{done.stdout[-4000:]}")
    return done.stdout.strip()


def _exists(image: str) -> bool:
    return bool(_buildah("images", "--quiet", "--filter", f"reference={image}"))


def base() -> str:
    """Make the base image unless it is there; its name."""
    if _exists(BASE_IMAGE):
        return BASE_IMAGE
    root = layout.cache_dir() / "base.tar"
    command = [
        "mmdebstrap",
        "--variant=minbase",
        f"--include={BASE_PACKAGES}",
        "bookworm",
        str(root),
    ]
    subprocess.run(command, check=True)
    work = _buildah("from", "scratch")
    _buildah("add", "--quiet", work, str(root), "/")
    files = Path(_buildah("mount", work))
    # As in python:3.11-slim, "python" exists and pip may install outside a venv.
    (files / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink(missing_ok=True)
    (files / "usr/bin/python").unlink(missing_ok=True)
    (files / "usr/bin/python").symlink_to("python3")
    _buildah("umount", work)
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    _buildah("config", "--env", f"PATH={path}", "--cmd", "python3", work)
    _buildah("commit", "--quiet", "--rm", work, BASE_IMAGE)
    root.unlink()
    return BASE_IMAGE


def build_image(
    context: Path,
    tag: str,
    output: Path,
    dockerfile: str | None = None,
    target: str = "",
    arguments: list[str] | None = None,
) -> Path:
    """Build a Dockerfile and write the image as an archive, which `load` and `up` take."""
    argv = ["build", "--layers", "--isolation", "chroot", "--network", "host", "--tag", tag]
    # pip in the build reaches the package index as pip on this machine does.
    certificates = os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")
    argv += ["--volume", f"{certificates}:/etc/ssl/certs/ca-certificates.crt:ro"]
    if Path("/etc/pip.conf").exists():
        argv += ["--volume", "/etc/pip.conf:/etc/pip.conf:ro"]
    for argument in arguments or []:
        argv += ["--build-arg", argument]
    if dockerfile:
        argv += ["--file", dockerfile]
    if target:
        argv += ["--target", target]
    _buildah(*argv, str(context))
    output.unlink(missing_ok=True)
    # Layers are not compressed in this format: written and loaded in half the time.
    _buildah("push", "--quiet", "--format", "docker", tag, f"docker-archive:{output}:{tag}")
    return output


def prune(prefix: str, kept: set[str]) -> None:
    """Forget the images whose reference begins with `prefix`, but for those to be kept."""
    listing = _buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines()
    if old := [name for name in listing if name.startswith(prefix) and name not in kept]:
        _buildah("rmi", *old)
    if len(_buildah("images", "--all", "--quiet").splitlines()) > MOST_IMAGES:
        _buildah("rmi", "--prune")
