"""The few Linux calls that Python 3.11 does not offer, cgroups and processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_SHARED = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Give the calling process namespaces of its own."""
    _check(_libc.unshare(flags), "unshare")


def setns(path: str, kind: int) -> None:
    """Move the calling process into the namespace behind this file."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(handle, kind), f"setns {path}")
    finally:
        os.close(handle)


def mount(source: str, target: str, fstype: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    _check(
        _libc.mount(
            source.encode(),
            target.encode(),
            fstype.encode() or None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        ),
        f"mount {source} on {target}",
    )


# --- processes -------------------------------------------------------------


def start_time(pid: int) -> str | None:
    """Kernel's start time of a live process; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def write_pid(path: Path, pid: int) -> None:
    """Remember a process that we started, safe against reuse of its number."""
    path.write_text(f"{pid} {start_time(pid)}\n")


def read_pid(path: Path) -> int | None:
    """The remembered process if it is still the same one and alive."""
    try:
        pid, started = path.read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if start_time(int(pid)) == started else None


def kill_and_wait(pid: int, sig: int = signal.SIGKILL, timeout: float = 20.0) -> bool:
    """Signal one process and wait until it is gone."""
    started = start_time(pid)
    if started is None:
        return True
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return True
    return wait_for(lambda: start_time(pid) != started, timeout, 0.02)


def wait_for(condition: Callable[[], object], timeout: float, pause: float = 0.1) -> bool:
    """Poll until the condition holds; False if the time runs out first."""
    deadline = time.monotonic() + timeout
    while True:
        if condition():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)


def spawn(argv: list[str], log: Path, cgroup: str, env: dict[str, str] | None = None) -> int:
    """Start a daemon in its own session and cgroup, its output going to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
            cwd="/",
            preexec_fn=lambda: join_cgroup(cgroup),
        )
    return process.pid


def run(*argv: str, check: bool = True, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run a short command; on failure its own words are in the exception."""
    done = subprocess.run(argv, capture_output=True, text=True, **kwargs)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done


def in_netns(path: str, function: Callable[[], bool]) -> bool:
    """Call a function in another network namespace, in a child process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            setns(path, CLONE_NEWNET)
            code = 0 if function() else 1
        except Exception:  # noqa: BLE001 - the child may only end, never go on as the parent
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- cgroup v1 -------------------------------------------------------------


def hierarchies() -> list[tuple[str, str, str]]:
    """Mounted cgroup hierarchies: (mount point, file system type, mount data)."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fstype, _, options = right.split(" ", 2)
        point = left.split()[4]
        if fstype == "cgroup2" and point != "/sys/fs/cgroup":
            found.append((point, fstype, ""))
        elif fstype == "cgroup":
            data = [o for o in options.split(",") if o not in ("rw", "ro")]
            if any(o.startswith("name=") for o in data):
                data.insert(0, "none")
            found.append((point, fstype, ",".join(data)))
    if not any(data == "memory" for _, _, data in found):
        raise RuntimeError("no cgroup v1 memory controller is mounted: only cgroup v1 is supported")
    return found


def make_cgroup(path: str) -> None:
    """Make a cgroup in every hierarchy, ready to take processes."""
    for point, _, data in hierarchies():
        folder = Path(point)
        for part in path.split("/"):
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            if "cpuset" in data.split(","):
                for name in ("cpuset.cpus", "cpuset.mems"):
                    if not (folder / name).read_text().strip():
                        (folder / name).write_text((parent / name).read_text())


def join_cgroup(path: str) -> None:
    """Move the calling process into the cgroup, in every hierarchy."""
    for point, _, _ in hierarchies():
        Path(point, path, "cgroup.procs").write_text(str(os.getpid()))


def _folders(path: str) -> Iterator[Path]:
    for point, _, _ in hierarchies():
        top = Path(point, path)
        if top.is_dir():
            for folder, _, _ in os.walk(top, topdown=False):
                yield Path(folder)


def cgroup_pids(path: str) -> set[int]:
    """Every process in the cgroup and in those below it."""
    pids: set[int] = set()
    for folder in _folders(path):
        try:
            pids.update(int(pid) for pid in (folder / "cgroup.procs").read_text().split())
        except OSError:
            continue
    return pids - {0}


def empty_cgroup(path: str, timeout: float = 20.0) -> None:
    """Kill what runs in the cgroup and remove it with all cgroups below it."""

    def gone() -> bool:
        for pid in cgroup_pids(path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in list(_folders(path)):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not any(True for _ in _folders(path))

    if not wait_for(gone, timeout, 0.05):
        raise RuntimeError(f"cgroup {path} still holds {sorted(cgroup_pids(path))}")
