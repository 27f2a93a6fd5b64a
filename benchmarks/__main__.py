"""Measure blocking time, time to durable, restores, pulls and memory, and print what is missed.

    python -m benchmarks                       2 GiB in 800 tensors, four minutes on free cores
    python -m benchmarks --mib 128 --rounds 2  a quick look
    python -m benchmarks --only job -o json

Real parts: sidecar processes on loopback addresses, trainer processes with a Checkpointer, sockets.
Every figure is a ratio to what the machine does with the same bytes, measured around it in the same
process. Needs free: /dev/shm 4 x the state, memory 6 x (the slots included), disk 3 x.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import peers
from benchmarks.figures import Sample, as_json, rows, table
from benchmarks.job import Job

STREAM_BYTES = 512 << 20
Group = Callable[[argparse.Namespace, Path, Path], list[Sample]]


def main() -> None:
    options = _parse()
    shm = Path(tempfile.mkdtemp(prefix="backstay-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="backstay-bench-", dir=options.disk))
    begun = time.monotonic()
    samples: list[Sample] = []
    try:
        for group in options.only:
            samples += GROUPS[group](options, shm / group, disk / group)
            shutil.rmtree(shm / group, ignore_errors=True)
            shutil.rmtree(disk / group, ignore_errors=True)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    found = rows(samples)
    if options.output == "json":
        print(as_json(found, _about(options)))
    else:
        print(table(found))
        about = ", ".join(f"{key} {value}" for key, value in _about(options).items())
        print(f"\n{about}; {time.monotonic() - begun:.0f} s")


def _job(options: argparse.Namespace, shm: Path, disk: Path) -> list[Sample]:
    """Saves and restores of one process after the other, each killed at its end."""
    samples: list[Sample] = []
    with Job(shm, disk, replicas=1) as job, _stream(shm) as port:

        def life(kind: str) -> None:
            print(f"{kind} ...", file=sys.stderr)
            process = job.start(0, kind, [*_arguments(options), "--stream", port])
            samples.extend(job.samples(process))
            job.kill_trainers()

        life("overlapped")
        life("fresh")
        life("synchronous")  # restores from memory
        job.lose_memory()
        life("synchronous")  # restores from the local disk
        life("fresh")
    return samples


def _neighbor(options: argparse.Namespace, shm: Path, disk: Path) -> list[Sample]:
    """A node is lost with its disk; its rank gets everything back from the neighbour."""
    samples: list[Sample] = []
    with Job(shm, disk, replicas=2) as job, _stream(shm) as port:
        for life in ("to the neighbour", "from the neighbour"):
            print(f"{life} ...", file=sys.stderr)
            arguments = [*_arguments(options), "--stream", port]
            owner = job.start(0, "owner", arguments)
            job.start(1, "holder", arguments)
            samples += job.samples(owner)
            job.kill_trainers()
            if life == "to the neighbour":
                job.lose_node(0)
    return samples


def _peers(options: argparse.Namespace, shm: Path, disk: Path) -> list[Sample]:
    """Other ways to save, in this process."""
    print("peers ...", file=sys.stderr)
    shm.mkdir()
    return peers.measure(options.mib, options.tensors, options.rounds, shm)


@contextmanager
def _stream(shm: Path) -> Iterator[str]:
    """The sender of the raw TCP stream, in a process of its own; gives its port."""
    path = shm / "streamed"
    shm.mkdir(exist_ok=True)
    with path.open("wb") as file:
        for _ in range(STREAM_BYTES >> 20):
            file.write(os.urandom(1 << 20))
    code = f"from benchmarks.limits import serve; serve({str(path)!r})"
    sender = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert sender.stdout is not None
        yield sender.stdout.readline().strip()
    finally:
        sender.kill()
        sender.wait()


def _arguments(options: argparse.Namespace) -> list[str]:
    names = ("mib", "tensors", "rounds")
    return [part for name in names for part in (f"--{name}", str(getattr(options, name)))]


def _about(options: argparse.Namespace) -> dict[str, object]:
    return {
        "MiB": options.mib,
        "tensors": options.tensors,
        "rounds": options.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mib", type=int, default=2048, help="size of the state (2048)")
    parser.add_argument("--tensors", type=int, default=800, help="number of tensors (800)")
    parser.add_argument("--rounds", type=int, default=5, help="samples in each process (5)")
    parser.add_argument("--only", choices=GROUPS, action="append", help="default: all but peers")
    parser.add_argument("--disk", help="a folder on the disk to measure (the temporary folder)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    options.only = options.only or ["job", "neighbor"]
    return options


GROUPS: dict[str, Group] = {"job": _job, "neighbor": _neighbor, "peers": _peers}

if __name__ == "__main__":
    main()
