"""Makes small OCI image archives without a registry or an image builder."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.harness import layout, linux
from cluster.harness.layout import Layout

SEEDS_KEPT = 3
SEED_FILE = "archives.json"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # as Linux and as Go say it
PAUSE_SOURCE = r"""
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void stop(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0) {} }

int main(void) {
    signal(SIGINT, stop);
    signal(SIGTERM, stop);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
"""


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def archive(target: Path, name: str, layer: bytes, config: dict[str, Any]) -> None:
    """Write an OCI archive with one uncompressed layer (a tar file's bytes)."""
    image = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    image_data = json.dumps(image).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": _digest(image_data),
            "size": len(image_data),
        },
        "layers": [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": _digest(layer),
                "size": len(layer),
            }
        ],
    }
    manifest_data = json.dumps(manifest).encode()
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": manifest["mediaType"],
                "digest": _digest(manifest_data),
                "size": len(manifest_data),
                "annotations": {"io.containerd.image.name": name},
            }
        ],
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
    }
    for blob in (image_data, manifest_data, layer):
        files["blobs/sha256/" + hashlib.sha256(blob).hexdigest()] = blob
    with tarfile.open(target, "w") as tar:
        for path, data in files.items():
            _add(tar, path, data, 0o644)


def _add(tar: tarfile.TarFile, path: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def _program_archive(binary: Path, name: str, user: str) -> Path:
    """An image that holds one static program."""
    target = layout.cache_dir() / f"{binary.name}.tar"
    if target.exists() and target.stat().st_mtime > binary.stat().st_mtime:
        return target
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        _add(tar, binary.name, binary.read_bytes(), 0o755)
    archive(target, name, layer.getvalue(), {"Entrypoint": [f"/{binary.name}"], "User": user})
    return target


def pause_archive() -> Path:
    """The image of every pod's first container, which only waits."""
    binary = layout.cache_dir() / "pause"
    if not binary.exists():
        binary.parent.mkdir(parents=True, exist_ok=True)
        command = ["gcc", "-Os", "-static", "-s", "-x", "c", "-", "-o", str(binary)]
        subprocess.run(command, input=PAUSE_SOURCE.encode(), check=True)
    return _program_archive(binary, layout.PAUSE_IMAGE, "65535:65535")


def dns_archive() -> Path:
    """CoreDNS as an image."""
    return _program_archive(layout.bin_dir() / "coredns", layout.DNS_IMAGE, "0:0")


def seed(cluster: Layout, archives: list[Path]) -> Path:
    """A containerd folder that holds these images, made once and kept in the cache.

    Nodes get it by hard links (see `plant`), so that an image is unpacked and stored once
    for all nodes and all boots. So does a new seed from the one before: only images that it
    lacks are imported. Older seeds are removed.
    """
    facts = sorted(_fact(path) for path in archives)
    key = hashlib.sha256(f"{SEED_FILE} {facts}".encode()).hexdigest()[:16]
    seeds = layout.cache_dir() / "seeds"
    seeds.mkdir(parents=True, exist_ok=True)
    with open(layout.cache_dir() / "seeds.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (seeds / key).exists():
            _make_seed(cluster, seeds / key, archives)
        os.utime(seeds / key)  # the last one used is the last one removed
    return seeds / key


def _make_seed(cluster: Layout, target: Path, archives: list[Path]) -> None:
    for broken in target.parent.glob("*.partial"):
        shutil.rmtree(broken)
    older = sorted(target.parent.glob("*"), key=lambda path: path.stat().st_mtime)
    for old in older[:-SEEDS_KEPT]:
        shutil.rmtree(old)
    partial = target.with_suffix(".partial")
    if older:
        plant(older[-1], partial)
    else:
        partial.mkdir(parents=True)
    with _containerd(cluster, partial) as ctr:
        _fill(partial / SEED_FILE, ctr, {_fact(path): path for path in archives})
    partial.rename(target)


def _fact(archive: Path) -> str:
    facts = archive.stat()
    return f"{archive} {facts.st_size} {facts.st_mtime_ns}"


def _fill(listing: Path, ctr: list[str], wanted: dict[str, Path]) -> None:
    """Import what is wanted, remove the images of archives that are not."""
    held = json.loads(listing.read_text()) if listing.exists() else []
    present = set(linux.run(*ctr, "images", "ls", "--quiet").stdout.split())
    kept = set()
    for fact, path in wanted.items():
        names = set(image_names(path))
        if fact not in held or not names <= present:
            linux.run(*ctr, "images", "import", str(path))
        kept |= names
    if stale := sorted(present - kept):
        linux.run(*ctr, "images", "rm", "--sync", *stale)
    listing.unlink(missing_ok=True)  # a hard link to the older seed's
    listing.write_text(json.dumps(sorted(wanted)))


def image_names(path: Path) -> list[str]:
    """The names that an archive gives to its images, in Docker's format or OCI's."""
    with tarfile.open(path) as tar:
        files = set(tar.getnames())
        listing = "manifest.json" if "manifest.json" in files else "index.json"
        content = tar.extractfile(listing)
        assert content is not None
        document = json.load(content)
    if listing == "manifest.json":
        return [name for image in document for name in image["RepoTags"]]
    return [image["annotations"]["io.containerd.image.name"] for image in document["manifests"]]


@contextmanager
def _containerd(cluster: Layout, root: Path) -> Iterator[list[str]]:
    """A containerd on this folder for the block; how its `ctr` is called."""
    state = cluster.run / "seed"
    socket = str(state / "containerd.sock")
    config = cluster.config / "seed.containerd"
    config.write_text(
        f"""version = 2
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.grpc.v1.cri"]

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{state}/opt"
"""
    )
    cgroup = f"{cluster.cgroup}/seed"
    linux.make_cgroup(cgroup)
    # In a mount namespace of its own: what it mounts to unpack ends with it.
    argv = ["unshare", "--mount", "--propagation", "private", "containerd", "--config", str(config)]
    pid = linux.spawn(argv, cluster.logs / "seed.log", cgroup)
    ctr = ["ctr", "--address", socket, "-n", "k8s.io"]
    try:
        if not linux.wait_for(lambda: linux.run(*ctr, "version", check=False).returncode == 0, 30):
            raise RuntimeError(f"containerd does not answer: see {cluster.logs}/seed.log")
        yield ctr
    finally:
        linux.kill_and_wait(pid, signal.SIGTERM)
        linux.empty_cgroup(cgroup)


def plant(source: Path, target: Path) -> None:
    """Give a new node the seed's images. Only the databases are ever written to again."""
    target.parent.mkdir(parents=True, exist_ok=True)
    linux.run("cp", "-al", str(source), str(target))
    for database in target.rglob("*.db"):
        database.unlink()
        shutil.copy2(source / database.relative_to(target), database)
