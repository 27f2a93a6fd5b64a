"""The images of the cluster tests: built by buildah, cached under a digest of their inputs.

The tag is that digest, so that a node can never run yesterday's code, and a second run builds
nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.harness import buildah, layout

ROOT = layout.TESTS.parent
REGISTRY = "backstay.test"
COMMON = (
    *("pyproject.toml", "README.md", "LICENSE", "protocol"),
    *("images/requirements.py", "images/needs.sh", "images/part.sh"),
)
BUILD_SECONDS = 900
KEPT = 2  # archives of older builds, an image


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One image and everything that goes into it."""

    name: str
    inputs: tuple[str, ...]
    dockerfile: str = "images/Dockerfile"
    target: str = ""
    """The stage that is the image; empty: the last one."""
    context: str = "."
    arguments: tuple[str, ...] = ()

    def digest(self) -> str:
        """Changes with each byte that may reach the image from this repository."""
        it = hashlib.sha256(f"{self.target} {self.arguments} {buildah.BASE_PACKAGES}".encode())
        for path in self._files():
            it.update(f"{path.relative_to(ROOT)}\n".encode())
            it.update(path.read_bytes())
        return it.hexdigest()[:16]

    def _files(self) -> Iterator[Path]:
        for name in sorted({self.dockerfile, ".dockerignore", *self.inputs}):
            top = ROOT / name
            found = [top] if top.is_file() else sorted(top.rglob("*"))
            yield from (p for p in found if p.is_file() and "__pycache__" not in p.parts)


RECIPES = (
    Recipe(
        name="backstay-operator",
        target="operator",
        inputs=(*COMMON, "operator"),
    ),
    Recipe(
        name="backstay-sidecar",
        target="sidecar",
        inputs=(*COMMON, "sidecar"),
    ),
    Recipe(
        name="backstay-example-trainer",
        target="trainer",
        inputs=(*COMMON, "images/node-torch.sh", "trainer_lib", "examples"),
        arguments=("TORCH=none",),
    ),
    Recipe(
        name="backstay-test-store",
        dockerfile="tests/cluster/images/store/Dockerfile",
        inputs=("tests/cluster/images/store",),
        context="tests/cluster/images/store",
    ),
)


@dataclass(frozen=True)
class Image:
    """A built image."""

    registry: str
    name: str
    tag: str
    archive: Path

    @property
    def reference(self) -> str:
        """What a pod names."""
        return f"{self.registry}/{self.name}:{self.tag}"


def build_all() -> dict[str, Image]:
    """Every image by name, built where it is not in the cache."""
    folder = layout.cache_dir() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return {recipe.name: _build(recipe, folder) for recipe in RECIPES}


def _build(recipe: Recipe, folder: Path) -> Image:
    tag = recipe.digest()
    image = Image(REGISTRY, recipe.name, tag, folder / f"{recipe.name}-{tag}.tar")
    if image.archive.exists():
        return image
    partial = image.archive.with_suffix(".partial")
    _tool("image-base")
    arguments = [f"BASE={buildah.BASE_IMAGE}", *recipe.arguments]
    _tool(
        "image-build",
        *(word for argument in arguments for word in ("--build-arg", argument)),
        *("--file", str(ROOT / recipe.dockerfile), "--target", recipe.target),
        *(str(ROOT / recipe.context), image.reference, str(partial)),
    )
    partial.rename(image.archive)
    older = sorted(folder.glob(f"{recipe.name}-*.tar"), key=lambda path: path.stat().st_mtime)
    for path in older[: -KEPT - 1]:
        path.unlink()
    buildah.prune(f"{REGISTRY}/{recipe.name}:", {image.reference})
    return image


def _tool(*argv: str) -> None:
    """In a process of its own, so that its output can be shown when it fails."""
    done = subprocess.run(
        [*layout.module("__main__"), *argv],
        env=layout.module_env(),
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
    )
    if done.returncode != 0:
        tail = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"scripts/cluster {' '.join(argv)} failed:\n{tail}")


def push(image: Image, registry: str) -> Image:
    """Copy an image to a registry that a cluster which is not ours can pull from."""
    copy = Image(registry, image.name, image.tag, image.archive)
    source = f"docker-archive:{image.archive}"
    subprocess.run(["buildah", "pull", source], check=True, capture_output=True)
    target = f"docker://{copy.reference}"
    subprocess.run(["buildah", "push", image.reference, target], check=True, capture_output=True)
    return copy


def load(image: Image, command: str) -> None:
    """Put an image onto the nodes of a cluster that is not ours, by the command for that."""
    words = [word.format(archive=image.archive) for word in shlex.split(command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
