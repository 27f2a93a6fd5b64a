"""What this machine can give: loopback addresses, ports, room in /dev/shm; and its nodes."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import zlib
from pathlib import Path

from backstay_cli.errors import CommandError, UsageError
from backstay_cli.local.state import SHM, StateFolder, memory_root
from backstay_operator.api import TrainingJob
from backstay_operator.api.quantity import format_bytes
from backstay_protocol.names import PORT_API, PORT_HEALTH

MOST_REPLICAS = 100  # addresses 127.a.b.100 to .199: equal length, so they sort as numbers do
_FIRST_HOST = 100
_STORE_HOST = 99


def check_size(job: TrainingJob) -> None:
    """Raises UsageError for a job that is too large for one machine's addresses."""
    if job.spec.replicas > MOST_REPLICAS:
        raise UsageError(
            f"spec.replicas: got {job.spec.replicas}; a local run has addresses for "
            f"{MOST_REPLICAS} replicas; make it smaller"
        )


def hosts_of(uid: str, replicas: int) -> dict[int, str]:
    """Each replica's own loopback address, whose string order is the replicas' order."""
    network = _network(uid)
    return {i: f"{network}.{_FIRST_HOST + i}" for i in range(replicas)}


def store_host(uid: str) -> str:
    """Address of the embedded store."""
    return f"{_network(uid)}.{_STORE_HOST}"


def _network(uid: str) -> str:
    number = zlib.crc32(uid.encode())
    return f"127.{1 + number % 253}.{1 + (number >> 8) % 253}"


def check_addresses(hosts: dict[int, str]) -> None:
    """Raises CommandError if a sidecar's port is taken."""
    for host in hosts.values():
        for port in (PORT_API, PORT_HEALTH):
            try:
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise CommandError(f"{host}:{port} can't be listened on: {error}") from error
                raise CommandError(
                    f"{host}:{port} is in use by another program (one that listens on every "
                    "address?)",
                    f"see who with: ss -ltnp 'sport = :{port}'",
                ) from error


def free_ports(host: str, count: int) -> list[int]:
    """Ports on which nobody listens just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind((host, 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def check_memory(job: TrainingJob, uid: str) -> None:
    """Raises UsageError if /dev/shm has no room for the memory volumes (docs/guarantees.md, 8)."""
    one = job.spec.checkpoint.memory.size_limit_bytes
    needed = one * job.spec.replicas
    there = shutil.disk_usage(SHM).free + folder_bytes(memory_root(uid))
    if needed > there:
        raise UsageError(
            f"spec.checkpoint.memory.sizeLimit: {job.spec.replicas} replicas x {format_bytes(one)} "
            f"need {format_bytes(needed)} in {SHM}, where {format_bytes(there)} are free",
            "make sizeLimit (or replicas, or slots) smaller, or enlarge it: "
            f"mount -o remount,size={format_bytes(needed * 1.1).replace(' ', '')[:-2]} {SHM}",
        )


def folder_bytes(root: Path) -> int:
    """Memory or disk that a folder's files take."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name), follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Nodes:
    """The pretended nodes of one job: a folder in the state folder, one in /dev/shm."""

    def __init__(self, state: StateFolder, uid: str) -> None:
        """Nothing is created yet."""
        self._state = state
        self._memory = memory_root(uid)

    def create(self, name: str) -> None:
        """A new machine, empty."""
        self._state.disk(name).mkdir(parents=True, exist_ok=True)
        self.memory(name).mkdir(parents=True, exist_ok=True, mode=0o770)

    def is_alive(self, name: str) -> bool:
        """Whether the machine is still there."""
        return self._state.disk(name).is_dir()

    def memory(self, name: str) -> Path:
        """Its memory volume."""
        return self._memory / name / "memory"

    def disk(self, name: str) -> Path:
        """Its disk."""
        return self._state.disk(name)

    def wipe_memory(self, name: str) -> None:
        """What a reboot does, or the end of a pod to its volume."""
        shutil.rmtree(self._memory / name, ignore_errors=True)
        if self.is_alive(name):
            self.memory(name).mkdir(parents=True, exist_ok=True, mode=0o770)

    def destroy(self, name: str) -> None:
        """Memory and disk are gone for ever."""
        shutil.rmtree(self._state.node(name), ignore_errors=True)
        shutil.rmtree(self._memory / name, ignore_errors=True)

    def close(self) -> None:
        """Give all memory back: the job has ended or its runner ends."""
        shutil.rmtree(self._memory, ignore_errors=True)
