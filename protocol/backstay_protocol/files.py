"""Small files: read whole, written by rename; and the modes of all files and folders that a trainer
and its sidecar share. Bulk bytes do not pass here.

Trainer and sidecar may be different users of one group. What they make is open to that group
whatever their umask says, which is the script's own in a trainer.
"""

from __future__ import annotations

import contextlib
import os
import threading

SMALL_FILE_LIMIT = 64 << 20
FILE_MODE = 0o660
FOLDER_MODE = 0o2770
"""What is made inside has the folder's group."""


def make_folder(path: str) -> None:
    """Make the folder, and those above it that are missing. Raises OSError."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:  # the other side made it just now
            if not os.path.isdir(folder):
                raise
        else:
            os.chmod(folder, FOLDER_MODE)


def open_shared(path: str, flags: int) -> int:
    """A descriptor of a file that both sides use, made where `flags` say so. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    if flags & os.O_CREAT:
        set_mode(descriptor, FILE_MODE)
    return descriptor


def set_mode(descriptor: int, mode: int) -> None:
    """Give a file of ours this mode, whatever the umask made of it."""
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_mode & 0o7777 != mode:
        os.fchmod(descriptor, mode)


def read_small(path: str) -> bytes:
    """The whole file, up to 64 MiB. Raises FileNotFoundError or OSError."""
    with open(path, "rb") as file:
        return file.read(SMALL_FILE_LIMIT)


def write_atomically(path: str, data: bytes, *, sync: bool = True, mode: int = FILE_MODE) -> None:
    """Make `path` hold `data`, or leave it as it was. With `sync` it survives a power cut."""
    temporary = f"{path}.tmp-{os.getpid()}-{threading.get_ident()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            if mode == FILE_MODE:
                set_mode(descriptor, mode)
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
