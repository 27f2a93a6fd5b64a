"""A local job: its state folder, running or not, and what its sidecars and its store say."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from backstay_cli.buckets import local_bucket
from backstay_cli.bundle.archive import Bundle
from backstay_cli.bundle.from_sidecars import gather_sidecars
from backstay_cli.bundle.listing import list_bucket, list_folder
from backstay_cli.errors import UsageError
from backstay_cli.find import LocalJob
from backstay_cli.leader import local_leader
from backstay_cli.local.state import memory_root
from backstay_cli.where import store_of


async def gather_local(job: LocalJob, bundle: Bundle) -> None:
    """Everything of it."""
    bundle.about = f"local job {job.name} ({'running' if job.running else 'stopped'})"
    root = job.folder.root
    bundle.masker.know(job.folder.token())
    if job.status.embedded:
        bundle.masker.know(*job.folder.store_keys())
    bundle.json("status.json", job.status, "the runner's record")
    _manifest(Path(job.status.manifest) if job.status.manifest else None, bundle)
    for path in sorted(job.folder.logs.rglob("*.log")):
        name = f"logs/{path.relative_to(job.folder.logs)}"
        with bundle.attempt(name):
            bundle.log(name, _end(path, bundle.limits.log_bytes), f"log {path}")
    for path in sorted((root / "pods").glob("*/*.json")):
        name = f"pods/{path.parent.name}/{path.name}"
        with bundle.attempt(name):
            bundle.json(name, json.loads(path.read_bytes()), "what the pod was told of the job")
    list_folder(root / "nodes", "disks.tsv", bundle)
    list_folder(memory_root(job.status.uid), "memory.tsv", bundle)
    if job.running:
        gather_sidecars(local_leader(job), bundle, lambda view: view.address)
    else:
        bundle.missing("leader", "the job does not run")
    await _store(job, bundle)


def _manifest(path: Path | None, bundle: Bundle) -> None:
    if path is None:
        bundle.missing("manifest.yaml", "the runner's record does not name it")
        return
    with bundle.attempt("manifest.yaml"):
        try:
            tree = yaml.safe_load(path.read_bytes())
        except yaml.YAMLError as error:
            raise UsageError(f"{path} is no YAML any more") from error
        text = yaml.safe_dump(bundle.masker.tree(tree), sort_keys=False)
        bundle.text("manifest.yaml", text, f"the manifest {path}, as it is now, without comments")


async def _store(job: LocalJob, bundle: Bundle) -> None:
    if not (job.status.embedded or job.status.endpoint):
        return
    with bundle.attempt("remote"):
        async with store_of(job) as endpoint:
            found = local_bucket(job, endpoint)
            bundle.masker.know(*found.bucket.address.keys, found.bucket.address.session_token)
            list_bucket(found, bundle)


def _end(path: Path, most: int) -> bytes:
    """A little more than is kept, so that it is seen to be cut."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most - 1))
        return file.read()
