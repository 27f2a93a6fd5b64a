"""One small job of real processes: sidecars on loopback addresses, each with a memory volume and a
disk of its own, and trainers that are started and killed again.

The processes end with this one.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from backstay_protocol import codec
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.names import (
    ENV_EXIT_WITH_PARENT,
    ENV_REPLICA,
    ENV_TOKEN,
    ENV_VOLUME,
    PORT_API,
    PORT_HEALTH,
    URL_HEALTHZ,
)
from backstay_protocol.topology import (
    LocalTier,
    MemoryTier,
    NeighborTier,
    Peer,
    PodIdentity,
    Retention,
    Schedule,
    Tiers,
    Topology,
)
from benchmarks.figures import Sample

TOKEN = "a-token-for-benchmarks"
PATIENCE_SECONDS = 300.0
FIRST_GENERATION = 1000
EVERY_STEPS = 4096
"""Of captures. The leader may widen an interval up to 64 times: saves are made at multiples of it
that stay due."""
MEMORY_STEPS = 64 * EVERY_STEPS
LOCAL_STEPS = 2 * MEMORY_STEPS


class Job:
    """Use it in a `with`."""

    def __init__(self, shm: Path, disk: Path, replicas: int) -> None:
        """`shm`, `disk`: folders for memory volumes and disks."""
        self._shm, self._disk = shm, disk
        self._network = _free_network(replicas)
        self._sidecars: dict[int, subprocess.Popen[bytes]] = {}
        self._trainers: list[subprocess.Popen[str]] = []
        self._generations = dict.fromkeys(range(replicas), FIRST_GENERATION)
        self._replicas = replicas
        for replica in range(replicas):
            self._write_topology(replica)
            self._write_pod(replica, replaces=0)

    def __enter__(self) -> Job:
        for replica in range(self._replicas):
            self.start_sidecar(replica)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_trainers()
        for replica in list(self._sidecars):
            self._kill_sidecar(replica)

    # --- places -------------------------------------------------------------------------------

    def memory(self, replica: int = 0) -> MemoryLayout:
        return MemoryLayout(str(self._shm / f"replica-{replica}"))

    def disk(self, replica: int = 0) -> Path:
        return self._disk / f"replica-{replica}"

    def address(self, replica: int = 0) -> str:
        return f"{self._network}.{10 + replica}:{PORT_API}"

    def _file(self, name: str) -> Path:
        return self._disk / name

    # --- sidecars -----------------------------------------------------------------------------

    def _write_topology(self, replica: int) -> None:
        """Of one sidecar: nodes have disks of their own."""
        self.disk(replica).mkdir(parents=True)
        one = Schedule(every_steps=LOCAL_STEPS)
        tiers = Tiers(
            memory=MemoryTier(schedule=Schedule(every_steps=EVERY_STEPS)),
            local=LocalTier(
                root=str(self.disk(replica)), schedule=one, retention=Retention(keep_last=1)
            ),
            neighbor=NeighborTier(schedule=one) if self._replicas > 1 else None,
        )
        topology = Topology(
            namespace="default",
            job="bench",
            run_name="bench",
            uid="bench",
            replicas=self._replicas,
            processes_per_replica=1,
            peers=tuple(Peer(replica=i, address=self.address(i)) for i in range(self._replicas)),
            tiers=tiers,
            first_generation=FIRST_GENERATION,
        )
        self._file(f"topology-{replica}.json").write_bytes(codec.dumps(topology))

    def _write_pod(self, replica: int, replaces: int) -> None:
        pod = PodIdentity(
            replica=replica,
            generation=self._generations[replica],
            current=dict(self._generations),
            replaces=replaces,
            uid=f"pod-{replica}-{self._generations[replica]}",
        )
        self._file(f"pod-{replica}.json").write_bytes(codec.dumps(pod))

    def start_sidecar(self, replica: int = 0) -> None:
        command = [
            *(sys.executable, "-m", "backstay_sidecar", "--volume", self.memory(replica).root),
            *("--topology", str(self._file(f"topology-{replica}.json"))),
            *("--pod", str(self._file(f"pod-{replica}.json"))),
        ]
        environment = {**os.environ, ENV_TOKEN: TOKEN, ENV_EXIT_WITH_PARENT: "1"}
        with self._file(f"sidecar-{replica}.log").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stderr=log)
        self._sidecars[replica] = process
        host = self.address(replica).partition(":")[0]
        self._wait(lambda: _is_healthy(host), f"sidecar {replica} to answer")

    def sidecar_pid(self, replica: int = 0) -> int:
        return self._sidecars[replica].pid

    def _kill_sidecar(self, replica: int) -> None:
        process = self._sidecars.pop(replica)
        process.kill()
        process.wait()

    def lose_memory(self, replica: int = 0) -> None:
        """As a reboot of the node: the disk stays."""
        self._kill_sidecar(replica)
        shutil.rmtree(self.memory(replica).root)
        self.start_sidecar(replica)

    def lose_node(self, replica: int) -> None:
        """Memory and disk are gone; another pod takes its place."""
        self._kill_sidecar(replica)
        shutil.rmtree(self.memory(replica).root)
        shutil.rmtree(self.disk(replica))
        self.disk(replica).mkdir()
        before = self._generations[replica]
        self._generations[replica] = max(self._generations.values()) + 1
        self._write_pod(replica, replaces=before)
        self.start_sidecar(replica)

    # --- trainers -----------------------------------------------------------------------------

    def start(self, rank: int, kind: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """A trainer; `kind` is a function of benchmarks.trainer."""
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._replicas),
            ENV_VOLUME: self.memory(rank).root,
            ENV_REPLICA: str(rank),
            ENV_EXIT_WITH_PARENT: "1",
        }
        command = [sys.executable, "-m", "benchmarks.trainer", kind, *arguments]
        command += ["--sidecar", str(self.sidecar_pid(rank)), "--api", self.address(rank)]
        command += ["--disk", str(self.disk(rank))]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._trainers.append(process)
        return process

    def samples(self, process: subprocess.Popen[str]) -> list[Sample]:
        """What a trainer measured, once it says that it is done. Raises if it fails."""
        assert process.stdout is not None
        found: list[Sample] = []
        for line in process.stdout:
            if line.strip() == "done":
                return found
            if line.startswith("{"):
                found.append(Sample(**json.loads(line)))
            else:
                print(line, end="", file=sys.stderr)
        logs = "".join(p.read_text()[-2000:] for p in self._disk.glob("sidecar-*.log"))
        raise RuntimeError(f"a trainer ended with {process.wait()}\n{logs}")

    def kill_trainers(self) -> None:
        """kill -9 of all, as a crash."""
        for process in self._trainers:
            process.kill()
        for process in self._trainers:
            process.wait()
        self._trainers.clear()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited in vain for {what}")
            time.sleep(0.05)


def _is_healthy(host: str) -> bool:
    connection = http.client.HTTPConnection(host, PORT_HEALTH, timeout=5)
    try:
        connection.request("GET", URL_HEALTHZ)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_network(replicas: int) -> str:
    """A /24 of 127/8 in which nobody listens on our ports."""
    for _ in range(100):
        network = f"127.{random.randrange(16, 250)}.{random.randrange(250)}"
        hosts = [f"{network}.{10 + i}" for i in range(replicas)]
        if all(_is_free(host, port) for host in hosts for port in (PORT_API, PORT_HEALTH)):
            return network
    raise OSError("no free loopback network")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind((host, port))
        return True
    return False
