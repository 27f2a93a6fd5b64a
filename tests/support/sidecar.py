"""Real sidecar processes on loopback addresses, and a stand-in for the trainer that writes slots.

    with SidecarJob(tmp_path, replicas=2) as job:
        job.start(0), job.start(1)
        job.save(rank=0, step=10, data=b"..." )
        job.wait_for(lambda: job.on_disk(0, "shards"), "a local copy")

Each replica has an address 127.a.b.(10+i) of its own, so the real ports are used. Memory volumes
lie in /dev/shm, disks under the given folder. Nothing outlives the `with`; sidecars also end with
pytest.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backstay_protocol import codec, slots
from backstay_protocol.control import ControlBlock, State, Word
from backstay_protocol.files import read_small
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout
from backstay_protocol.manifest import SCHEDULE, Manifest, read_manifest
from backstay_protocol.messages import (
    GO,
    LOAD,
    ConfirmReply,
    ConfirmRequest,
    Decision,
    RestoreReply,
    RestoreRequest,
)
from backstay_protocol.names import (
    ENV_EXIT_WITH_PARENT,
    ENV_FAULTS,
    ENV_TOKEN,
    HEADER_PROTOCOL,
    PLAN_LOCAL,
    PORT_API,
    PORT_HEALTH,
    PROTOCOL_VERSION,
    URL_CONFIRM,
    URL_RESTORE,
)
from backstay_protocol.topology import LocalTier, ManualChoice, Peer, PodIdentity, Tiers, Topology

TOKEN = "a-token-for-tests-0123456789"
CHUNK_BYTES = 64 << 10
WAIT_SECONDS = 50.0


@dataclass(frozen=True)
class Answer:
    """What a sidecar answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def read(self, kind: type) -> Any:
        """The body as a message; the status must be 200."""
        assert self.status == 200, (self.status, self.body)
        return codec.loads(kind, self.body)


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    log: Path


@dataclass
class SidecarJob:
    """One job's sidecars."""

    folder: Path
    replicas: int = 1
    per_replica: int = 1
    tiers: Tiers | None = None
    """Default: memory, and local under `folder`."""
    generations: Mapping[int, int] = field(default_factory=dict)
    """Replica -> generation; empty: a bare topology."""
    topology_fields: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    namespace: str = "test"
    run_name: str = "run"
    builds: dict[int, str] = field(default_factory=dict)
    """Replica -> where another build's packages are, as in PYTHONPATH; read at each start."""

    def __enter__(self) -> SidecarJob:
        self._network = _free_network(self.replicas)
        self._shm = Path(tempfile.mkdtemp(prefix="backstay-test-", dir="/dev/shm"))
        self._processes: dict[int, _Process] = {}
        self._nonces: dict[int, str] = {}
        if self.tiers is None:
            self.tiers = Tiers(local=LocalTier(root=str(self.folder / "disk")))
        self.topology = Topology(
            namespace=self.namespace,
            job="job",
            run_name=self.run_name,
            uid=uuid.uuid4().hex,
            replicas=self.replicas,
            processes_per_replica=self.per_replica,
            peers=tuple(
                Peer(replica=i, address=f"{self.host(i)}:{PORT_API}") for i in range(self.replicas)
            ),
            tiers=self.tiers,
            **self.topology_fields,
        )
        self._write_topology()
        return self

    def choose(self, choice: ManualChoice | None) -> None:
        """The job's `restore` changes; sidecars that start from now on know."""
        restore = dataclasses.replace(self.topology.restore, choice=choice)
        self.topology = dataclasses.replace(self.topology, restore=restore)
        self._write_topology()

    def _write_topology(self) -> None:
        (self.folder / "topology.json").write_bytes(codec.dumps(self.topology))

    def __exit__(self, *_: object) -> None:
        for index in list(self._processes):
            self.kill(index)
        shutil.rmtree(self._shm, ignore_errors=True)

    # --- places -------------------------------------------------------------------------------

    def host(self, replica: int) -> str:
        return f"{self._network}.{10 + replica}"

    def memory(self, replica: int) -> MemoryLayout:
        return MemoryLayout(str(self._shm / f"replica-{replica}"))

    def disk(self, replica: int) -> DiskLayout:
        assert self.topology.tiers.local is not None
        return DiskLayout(self.topology.tiers.local.root, self.topology.run, replica)

    def replica_of(self, rank: int) -> int:
        return rank // self.per_replica

    def on_disk(self, replica: int, area: str = "shards") -> list[tuple[CheckpointId, int]]:
        """(checkpoint, rank) of each manifest in an area whose bytes are all there, verified."""
        folder = Path(self.disk(replica).folder, area)
        found = []
        for path in sorted(folder.glob("*/*.json")):
            try:
                manifest = read_manifest(read_small(str(path)), str(path))
                data = path.with_suffix(".safetensors").read_bytes()
            except FileNotFoundError:
                assert not path.exists(), "a manifest without its bytes"
                continue  # it was deleted while we looked
            assert_whole(manifest, data)
            found.append((manifest.checkpoint, manifest.rank))
        return found

    # --- processes ----------------------------------------------------------------------------

    def start(
        self,
        replica: int = 0,
        *,
        faults: str = "",
        env: Mapping[str, str] | None = None,
        wait: bool = True,
        prefix: tuple[str, ...] = (),
        arguments: tuple[str, ...] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a sidecar and wait until it answers. `prefix`: a command to run it under."""
        assert replica not in self._processes, "stop or kill it first"
        identity = self._identity(replica)
        log = self.folder / f"sidecar-{replica}.log"
        environment = {
            **os.environ,
            ENV_TOKEN: TOKEN,
            ENV_EXIT_WITH_PARENT: "1",
            **self.env,
            **({"PYTHONPATH": self.builds[replica]} if self.builds.get(replica) else {}),
            **(env or {}),
        }
        if faults:
            environment[ENV_FAULTS] = faults
        command = [
            *(*prefix, sys.executable, "-m", "backstay_sidecar"),
            *("--topology", str(self.folder / "topology.json"), *identity),
            *("--volume", self.memory(replica).root, *arguments),
        ]
        with log.open("ab") as stderr:
            popen = subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr)
        self._processes[replica] = _Process(popen, log)
        if wait:
            self.wait_for(lambda: self._answers(replica), f"sidecar {replica} to answer")
        return popen

    def _identity(self, replica: int) -> tuple[str, ...]:
        if not self.generations:
            return ("--replica", str(replica))
        path = self.folder / f"pod-{replica}.json"
        if not path.exists():
            pod = PodIdentity(
                replica=replica,
                generation=self.generations[replica],
                current=dict(self.generations),
                uid=f"pod-{replica}",
            )
            path.write_bytes(codec.dumps(pod))
        return ("--pod", str(path))

    def _answers(self, replica: int) -> bool:
        code = self._processes[replica].popen.poll()
        assert code is None, f"sidecar {replica} ended with {code}:\n{self.log(replica)}"
        try:
            return self.request(replica, "GET", "/healthz", port="health").status == 200
        except OSError:
            return False

    def alive(self, replica: int = 0) -> bool:
        """Whether it runs; a dead one is forgotten so that it can be started again."""
        process = self._processes.get(replica)
        return process is not None and process.popen.poll() is None

    def wait_dead(self, replica: int = 0) -> int:
        """Wait for it to end by itself (a fault point); its exit code."""
        return self._processes.pop(replica).popen.wait(WAIT_SECONDS)

    def kill(self, replica: int = 0) -> None:
        """kill -9."""
        process = self._processes.pop(replica)
        process.popen.kill()
        process.popen.wait(WAIT_SECONDS)

    def stop(self, replica: int = 0) -> int:
        """SIGTERM; its exit code."""
        process = self._processes.pop(replica)
        process.popen.send_signal(signal.SIGTERM)
        return process.popen.wait(WAIT_SECONDS)

    def wipe_memory(self, replica: int) -> None:
        """As a reboot of the node does. The sidecar must not run."""
        assert replica not in self._processes
        shutil.rmtree(self.memory(replica).root, ignore_errors=True)

    def wipe_disk(self, replica: int) -> None:
        """Another node, or a new disk."""
        shutil.rmtree(self.disk(replica).folder, ignore_errors=True)

    def log(self, replica: int = 0) -> str:
        return (self.folder / f"sidecar-{replica}.log").read_text(errors="replace")

    # --- HTTP ---------------------------------------------------------------------------------

    def request(
        self,
        replica: int,
        method: str,
        path: str,
        message: Any = None,
        *,
        port: str = "api",
        token: str | None = TOKEN,
        headers: Mapping[str, str] | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> Answer:
        """One request. `port`: api, health or unix."""
        body = message if isinstance(message, bytes) else None
        given = {HEADER_PROTOCOL: PROTOCOL_VERSION}
        if message is not None:
            body = body if body is not None else codec.dumps(message)
            given["Content-Type"] = "application/json"
        if token is not None and port == "api":
            given["Authorization"] = f"Bearer {token}"
        given.update(headers or {})
        connection = self.connection(replica, port, timeout)
        try:
            connection.request(method, path, body, given)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def connection(
        self, replica: int, port: str = "api", timeout: float = WAIT_SECONDS
    ) -> http.client.HTTPConnection:
        """A connection to one of the three listeners."""
        if port == "unix":
            return _UnixConnection(self.memory(replica).socket, timeout)
        number = PORT_HEALTH if port == "health" else PORT_API
        return http.client.HTTPConnection(self.host(replica), number, timeout=timeout)

    def wait_for(
        self, condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS
    ) -> Any:
        """Wait until `condition` gives something true; return it. Fails with the logs."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- sidecar {path.name}:\n{path.read_text(errors='replace')[-4000:]}"
                    for path in sorted(self.folder.glob("sidecar-*.log"))
                )
                raise AssertionError(f"waited {seconds:g} s in vain for {what}\n{logs}")
            time.sleep(0.02)
        return found

    # --- the trainer's part -------------------------------------------------------------------

    def save(
        self,
        *,
        rank: int,
        step: int,
        data: bytes,
        attempt: int = 1,
        slot: int = 0,
        reason: str = SCHEDULE,
        chain: tuple[tuple[int, int], ...] = (),
        plan: str = PLAN_LOCAL,
        publish: bool = True,
        chunk_size: int = CHUNK_BYTES,
    ) -> Manifest:
        """What a rank's capture does: withdraw, write in place, publish; report in the block."""
        memory = self.memory(self.replica_of(rank))
        os.makedirs(memory.rank_folder(rank), exist_ok=True)
        path = memory.slot(rank, slot)
        if os.path.exists(path):
            self.wait_for(lambda: _withdrawn(memory, rank, slot), f"slot {slot} of rank {rank}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        try:
            os.posix_fallocate(descriptor, 0, len(data))
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)
        manifest = Manifest(
            run=self.topology.run,
            step=step,
            attempt=attempt,
            rank=rank,
            world_size=self.topology.world_size,
            replica=self.replica_of(rank),
            plan=plan,
            size=len(data),
            created=time.time(),
            chain=chain,
            chunk_size=chunk_size,
            reason=reason,
        )
        if publish:
            slots.publish(memory, rank, slot, manifest)
            with self.block(rank) as block:
                block[Word.PUBLISHED_STEP] = step
                block[Word.SAVES] += 1
        return manifest

    @contextmanager
    def block(self, rank: int) -> Iterator[ControlBlock]:
        """The rank's control block, made where it is missing."""
        memory = self.memory(self.replica_of(rank))
        os.makedirs(memory.rank_folder(rank), exist_ok=True)
        block = ControlBlock(memory.control(rank), create=True, rank=rank)
        try:
            yield block
        finally:
            block.close()

    def word(self, rank: int, word: Word) -> int:
        """One word of the rank's control block."""
        with self.block(rank) as block:
            return block[word]

    def train(self, rank: int, attempt: int, step: int) -> None:
        """The rank reports that it trains."""
        with self.block(rank) as block:
            block[Word.ATTEMPT] = attempt
            block[Word.STATE] = State.TRAINING
            block[Word.STEP] = step
            block[Word.STEP_TIME] = time.time_ns()

    def join(self, rank: int, nonce: str = "", wait_seconds: float = 0.5) -> RestoreReply:
        """One POST /v1/restore of a rank; a new process unless `nonce` is given."""
        if nonce or rank not in self._nonces:
            self._nonces[rank] = nonce or uuid.uuid4().hex
        with self.block(rank) as block:
            block[Word.STATE] = State.RESTORING
        request = RestoreRequest(
            rank=rank,
            local_rank=rank % self.per_replica,
            world_size=self.topology.world_size,
            nonce=self._nonces[rank],
            pid=os.getpid(),
            wait_seconds=wait_seconds,
        )
        answer = self.request(
            self.replica_of(rank), "POST", URL_RESTORE, request, port="unix", timeout=60
        )
        reply: RestoreReply = answer.read(RestoreReply)
        return reply

    def confirm(
        self, rank: int, decision: Decision, wait_seconds: float = 0.5, **more: Any
    ) -> ConfirmReply:
        """One POST /v1/restore/confirm of a rank: its load went well, unless `more` says not."""
        request = ConfirmRequest(
            rank=rank,
            nonce=self._nonces[rank],
            round=decision.round,
            serial=decision.serial,
            ok=True,
            wait_seconds=wait_seconds,
        )
        request = replace(request, **more)
        answer = self.request(
            self.replica_of(rank), "POST", URL_CONFIRM, request, port="unix", timeout=60
        )
        reply: ConfirmReply = answer.read(ConfirmReply)
        return reply

    def begin(self) -> Decision:
        """All ranks join as new processes, load nothing, confirm, and train: one whole round."""
        ranks = range(self.topology.world_size)
        self._nonces = {rank: uuid.uuid4().hex for rank in ranks}
        decisions: dict[int, Decision] = {}

        def joined() -> bool:
            for rank in ranks:
                reply = self.join(rank)
                assert reply.status in ("wait", LOAD), reply
                if reply.decision is not None:
                    decisions[rank] = reply.decision
            return len(decisions) == len(ranks)

        def gone() -> bool:
            replies = [self.confirm(rank, decisions[rank]) for rank in ranks]
            assert all(reply.status in ("wait", GO) for reply in replies), replies
            return all(reply.status == GO for reply in replies)

        self.wait_for(joined, "a decision")
        self.wait_for(gone, "the go-ahead")
        decision = decisions[0]
        for rank in ranks:
            self.train(rank, decision.attempt, decision.base.step if decision.base else 0)
        return decision


def random_bytes(num_bytes: int, seed: int) -> bytes:
    """The same for the same seed."""
    return random.Random(seed).randbytes(num_bytes)


def assert_whole(manifest: Manifest, data: bytes) -> None:
    """The bytes are what the sealed manifest promises."""
    import xxhash

    assert manifest.sealed
    assert manifest.digests is not None
    assert len(data) == manifest.size
    for index, digest in enumerate(manifest.digests):
        start, stop = manifest.chunk(index)
        assert xxhash.xxh3_128_hexdigest(data[start:stop]) == digest, f"chunk {index}"


def _withdrawn(memory: MemoryLayout, rank: int, slot: int) -> bool:
    try:
        slots.withdraw(memory, rank, slot)
    except slots.SlotBusy:
        return False
    return True


def _free_network(replicas: int) -> str:
    """A /24 of 127/8 in which nobody listens on our ports."""
    for _ in range(100):
        network = (
            f"127.{random.SystemRandom().randrange(16, 250)}.{random.SystemRandom().randrange(250)}"
        )
        if all(
            _is_free(f"{network}.{10 + i}", port)
            for i in range(replicas)
            for port in (PORT_API, PORT_HEALTH)
        ):
            return network
    raise AssertionError("no free loopback network")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return True
    return False


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
