"""Names and sizes of what is kept: of a run in a bucket, of disks. Never a byte of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from backstay_cli.buckets import RunBucket
from backstay_cli.bundle.archive import Bundle

REMOTE_PATH = "remote/keys.tsv"


def list_bucket(found: RunBucket, bundle: Bundle) -> None:
    """Every key of the run, with its size."""
    with bundle.attempt(REMOTE_PATH):
        keys = found.bucket.list(found.layout.root)
        _put(bundle, REMOTE_PATH, keys, f"keys below {found.layout.root} in {found.bucket}")
    bundle.fetch(
        "remote/checkpoints.json", "checkpoints in the bucket", found.catalog().checkpoints
    )


def list_folder(folder: Path, path: str, bundle: Bundle) -> None:
    """Every file below a folder, with its size."""
    with bundle.attempt(path):
        _put(bundle, path, _files(folder), f"files below {folder}")


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for root, _, names in sorted(os.walk(folder)):
        for name in sorted(names):
            file = Path(root, name)
            yield str(file.relative_to(folder)), file.stat().st_size


def _put(bundle: Bundle, path: str, found: Iterable[tuple[str, int]], what: str) -> None:
    lines = [f"{size}\t{name}\n" for name, size in found]
    most = bundle.limits.keys
    if len(lines) > most:
        bundle.missing(path, f"{len(lines) - most} of {len(lines)} names are left out")
    bundle.text(path, "".join(lines[-most:]), what, cut=len(lines) > most)
