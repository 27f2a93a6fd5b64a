"""Small files: read whole, written by rename. Bulk bytes do not pass here."""

from __future__ import annotations

import contextlib
import os
import threading

SMALL_FILE_LIMIT = 64 << 20


def read_small(path: str) -> bytes:
    """The whole file, up to 64 MiB. Raises FileNotFoundError or OSError."""
    with open(path, "rb") as file:
        return file.read(SMALL_FILE_LIMIT)


def write_atomically(path: str, data: bytes, *, sync: bool = True, mode: int = 0o660) -> None:
    """Make `path` hold `data`, or leave it as it was. With `sync` it survives a power cut."""
    temporary = f"{path}.tmp-{os.getpid()}-{threading.get_ident()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if sync:
        sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Make renames and unlinks in a folder survive a power cut."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
