"""Looking at processes through /proc: who descends from whom, and which are a replica's ranks."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass

_PR_SET_CHILD_SUBREAPER = 36
_RANK_MARK = b"LOCAL_RANK="


@dataclass(frozen=True, order=True)
class ProcessId:
    """A process that can't be mistaken for a later one of the same number."""

    pid: int
    started: int
    """Clock ticks since boot."""


def children_by_parent() -> dict[int, list[ProcessId]]:
    """One look at the whole table."""
    table: dict[int, list[ProcessId]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = _stat(int(name))
        if fields is not None:
            child = ProcessId(int(name), int(fields[19]))
            table.setdefault(int(fields[1]), []).append(child)
    return table


def descendants(root: int, table: dict[int, list[ProcessId]]) -> list[ProcessId]:
    """All below `root`, parents before children."""
    found: list[ProcessId] = []
    todo = [root]
    while todo:
        below = table.get(todo.pop(0), [])
        found += below
        todo += [child.pid for child in below]
    return found


def rank_processes(shim: int, table: dict[int, list[ProcessId]]) -> dict[int, ProcessId]:
    """Local rank -> its process, below one trainer container.

    These are the topmost processes that carry LOCAL_RANK: torchrun sets it for its workers (their
    data-loader workers inherit it), we set it for a program without a launcher.
    """
    found: dict[int, ProcessId] = {}
    todo = [shim]
    while todo:
        for child in table.get(todo.pop(0), []):
            rank = _local_rank(child.pid)
            if rank is None:
                todo.append(child.pid)
            else:
                found.setdefault(rank, child)
    return found


def kill(process: ProcessId) -> bool:
    """SIGKILL exactly this process. Returns whether it was still there."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        fields = _stat(process.pid)
        if fields is None or int(fields[19]) != process.started:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def become_subreaper() -> None:
    """Orphans of a shim that somebody killed come to this process, which then kills them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def kill_strays(known: Collection[int]) -> int:
    """Kill (and reap) children of this process that it did not start, and all below them."""
    table = children_by_parent()
    strays = [child for child in table.get(os.getpid(), []) if child.pid not in known]
    for stray in strays:
        for process in [*descendants(stray.pid, table), stray]:
            kill(process)
    for stray in strays:
        try:
            os.waitpid(stray.pid, os.WNOHANG)
        except ChildProcessError:
            continue
    return len(strays)


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/<pid>/stat from the state on (index 1: parent, 19: start time)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _local_rank(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    for entry in entries:
        if entry.startswith(_RANK_MARK):
            text = entry.removeprefix(_RANK_MARK)
            return int(text) if text.isdigit() else None
    return None
