"""Builds the cluster's programs from Go modules into the cache folder.

The modules' versions are pinned in tools/*/go.mod and go.sum. Called by `build` and `up`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cluster.harness import golang, layout

KUBERNETES = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler",
    "kubelet", "kube-proxy", "kubectl",
)  # fmt: skip
VERSION_PACKAGE = "k8s.io/component-base/version"
HELM_VERSION = "v3.22.0"


@dataclass(frozen=True)
class Target:
    """One call of `go build`."""

    module: str
    """Folder below tools/."""
    programs: tuple[str, ...]
    packages: tuple[str, ...]
    flags: str = ""
    """For the linker: versions that the programs tell of themselves."""

    @property
    def folder(self) -> Path:
        """Where go.mod and go.sum lie."""
        return layout.HERE / "tools" / self.module

    def fingerprint(self) -> str:
        """Changes with anything that the built programs depend on."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            digest.update(path.read_bytes())
        digest.update(f"{self.flags} {list(self.packages)}".encode())
        return f"{digest.hexdigest()} {golang.version()}"

    def stamp(self) -> Path:
        """The file that keeps the fingerprint of what is built."""
        return layout.bin_dir() / f".{self.programs[0]}.stamp"

    def up_to_date(self) -> bool:
        """Whether all of it is built, from these inputs."""
        made = all((layout.bin_dir() / name).exists() for name in self.programs)
        return made and self.stamp().exists() and self.stamp().read_text() == self.fingerprint()


def _version_flags() -> str:
    _, minor, _ = layout.KUBERNETES_VERSION.split(".")
    values = {
        "gitVersion": layout.KUBERNETES_VERSION,
        "gitMajor": "1",
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": "module",
    }
    return " ".join(f"-X {VERSION_PACKAGE}.{name}={value}" for name, value in values.items())


def targets() -> list[Target]:
    """Everything that is built."""
    commands = tuple(f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES)
    # helm takes this Kubernetes for its own where it asks no cluster: `helm template`, `helm lint`.
    _, minor, _ = layout.KUBERNETES_VERSION.split(".")
    helm = f"-X helm.sh/helm/v3/internal/version.version={HELM_VERSION}"
    for package in ("chartutil", "lint/rules"):
        for part, number in (("Major", "1"), ("Minor", minor)):
            helm += f" -X helm.sh/helm/v3/pkg/{package}.k8sVersion{part}={number}"
    router = "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
    return [
        Target("kubernetes", KUBERNETES, commands, _version_flags()),
        Target("kubernetes", ("etcd",), ("go.etcd.io/etcd/server/v3",)),
        Target("coredns", ("coredns",), (".",)),
        Target("helm", ("helm",), ("helm.sh/helm/v3/cmd/helm",), helm),
        Target("kube-router", ("kube-router",), (router,)),
    ]


def build(only: list[str] | None = None) -> None:
    """Build what is missing or was built from other inputs."""
    layout.bin_dir().mkdir(parents=True, exist_ok=True)
    for target in targets():
        if not only or set(only) & set(target.programs):
            _build(target)


def outdated() -> bool:
    """Whether `build` would build anything."""
    return not all(target.up_to_date() for target in targets())


def _build(target: Target) -> None:
    folder = layout.bin_dir()
    if target.up_to_date():
        print(f"up to date: {' '.join(target.programs)}", flush=True)
        return
    print(f"building: {' '.join(target.programs)}", flush=True)
    out = f"{folder}/" if len(target.programs) > 1 else str(folder / target.programs[0])
    command = ["nice", golang.program(), "build", "-trimpath"]
    command += ["-ldflags", f"-s -w {target.flags}", "-o", out, *target.packages]
    subprocess.run(command, cwd=target.folder, env=os.environ | {"CGO_ENABLED": "0"}, check=True)
    target.stamp().write_text(target.fingerprint())


def missing(optional: set[str]) -> list[str]:
    """Programs that the cluster cannot start without and that are not built."""
    needed = {name for target in targets() for name in target.programs} - optional
    return sorted(name for name in needed if not (layout.bin_dir() / name).exists())
