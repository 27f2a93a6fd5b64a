"""The state folder of a local job and its memory folder: the only module that knows their layout.

<state dir>/
  status.json      what the runner persists: generations before pods, nodes, outcome (atomic, fsync)
  runner.lock      held (flock) while a runner lives
  token  s3.json   the job's token, keys of the embedded store (0600)
  nodes/<node>/disk/           a node's disk; gone with the node
  pods/<pod>/                  topology.json, pod.json
  logs/<pod>/<container>.log   also store.log
  store/           data of the embedded store
/dev/shm/backstay-<8 characters of the uid>/
  job.json         where the state folder is: by it other terminals find a running job
  runner.sock      orders for the runner (a short path: unix sockets allow 107 bytes)
  <node>/memory/   a node's memory volume
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backstay_cli.errors import CommandError, UsageError
from backstay_operator.decide.observed import JobRecord
from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError
from backstay_protocol.files import write_atomically

ENV_HOME = "BACKSTAY_HOME"
SHM = "/dev/shm"
_SHM_PREFIX = "backstay-"


@dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """One pretended node."""

    name: str
    replica: int
    """Whose pod it runs: a node has one."""
    lost: str = ""
    """Not empty: it was destroyed; why."""


@dataclass(frozen=True, kw_only=True)
class LocalStatus:
    """status.json. Written by the runner, read by it and by other commands."""

    uid: str
    job: str
    namespace: str
    run: str
    replicas: int
    created: float
    manifest: str
    spec_digest: str
    """Of the job as it was run: another one is a job that was applied again."""
    hosts: dict[int, str]
    """Replica -> its loopback address."""
    record: JobRecord
    nodes: tuple[NodeRecord, ...] = ()
    next_node: int = 0
    running: dict[int, int] = field(default_factory=dict)
    """Replica -> generation of a pod that exists; a new runner goes on with it in place."""
    conditions: tuple[dict[str, str], ...] = ()
    bucket: str = ""
    prefix: str = ""
    region: str = ""
    endpoint: str = ""
    """Of the remote tier; empty when embedded or none."""
    embedded: bool = False
    store_endpoint: str = ""
    """Of the embedded store, while the job runs."""

    def node_of(self, replica: int) -> NodeRecord | None:
        """The living node of a replica."""
        return next((n for n in self.nodes if n.replica == replica and not n.lost), None)


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """job.json in the memory folder."""

    job: str
    namespace: str
    state_dir: str
    pid: int


def default_state_dir(namespace: str, job: str) -> Path:
    """`${BACKSTAY_HOME:-~/.backstay}/local/<namespace>/<name>`."""
    return home() / "local" / namespace / job


def home() -> Path:
    """Where local jobs are kept."""
    return Path(os.environ.get(ENV_HOME) or "~/.backstay").expanduser()


class StateFolder:
    """Paths and small files of one local job."""

    def __init__(self, root: Path) -> None:
        """Nothing is created yet."""
        self.root = root.absolute()
        self.logs = self.root / "logs"
        self.store = self.root / "store"
        self._status = self.root / "status.json"

    # --- status -------------------------------------------------------------------------------

    def read(self) -> LocalStatus | None:
        """None: there was no run yet. Raises CommandError if it can't be read."""
        try:
            return codec.loads(LocalStatus, self._status.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ProtocolError) as error:
            raise CommandError(
                f"{self._status} can't be read: {error}",
                "start over with --fresh (it forgets the job's checkpoints in that folder)",
            ) from error

    def write(self, status: LocalStatus) -> None:
        """Durably, before anything that it announces is done."""
        write_atomically(str(self._status), codec.dumps(status), mode=0o600)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the job. Raises UsageError while another runner has it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / "runner.lock", "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                raise UsageError(
                    f"this job runs already (process {lock.read().strip() or 'unknown'}, state in "
                    f"{self.root})",
                    "stop it there with Ctrl-C, or give this run another --state-dir",
                ) from error
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    def is_running(self) -> bool:
        """Whether a runner holds the job."""
        try:
            with open(self.root / "runner.lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def forget(self) -> None:
        """Remove everything but the lock; the memory folder too. Call it with the lock held."""
        status = None
        with contextlib.suppress(CommandError):
            status = self.read()
        if status is not None:
            shutil.rmtree(memory_root(status.uid), ignore_errors=True)
        for entry in self.root.iterdir():
            if entry.name == "runner.lock":
                continue
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    # --- secrets ------------------------------------------------------------------------------

    def token(self) -> str:
        """The job's bearer token, made at first use."""
        return self._secret("token", lambda: secrets.token_hex(32))

    def store_keys(self) -> tuple[str, str]:
        """Access and secret key of the embedded store, made at first use."""
        text = self._secret(
            "s3.json", lambda: json.dumps([secrets.token_hex(10), secrets.token_hex(20)])
        )
        access, secret = json.loads(text)
        return access, secret

    def _secret(self, name: str, make: object) -> str:
        path = self.root / name
        if not path.exists():
            assert callable(make)
            write_atomically(str(path), str(make()).encode(), mode=0o600)
        return path.read_text().strip()

    # --- nodes and pods -------------------------------------------------------------------------

    def node(self, name: str) -> Path:
        """A node's folder: while it exists, the node does."""
        return self.root / "nodes" / name

    def disk(self, name: str) -> Path:
        """A node's disk."""
        return self.node(name) / "disk"

    def pod(self, name: str) -> Path:
        """A pod's configuration volume."""
        return self.root / "pods" / name


def memory_root(uid: str) -> Path:
    """The job's folder in /dev/shm."""
    return Path(SHM) / f"{_SHM_PREFIX}{uid[:8]}"


def control_socket(uid: str) -> Path:
    """Where the runner takes orders."""
    return memory_root(uid) / "runner.sock"


def new_uid() -> str:
    """A job's uid, of which the first eight characters are free in /dev/shm."""
    while True:
        uid = str(uuid.uuid4())
        if not memory_root(uid).exists():
            return uid


def announce(status: LocalStatus, state: StateFolder) -> None:
    """Let other terminals find the job."""
    root = memory_root(status.uid)
    root.mkdir(mode=0o700, exist_ok=True)
    running = RunningJob(
        job=status.job,
        namespace=status.namespace,
        state_dir=str(state.root),
        pid=os.getpid(),
    )
    write_atomically(str(root / "job.json"), codec.dumps(running), sync=False, mode=0o600)


def known_jobs() -> list[RunningJob]:
    """Jobs of this user that a runner announced, running or not, by name."""
    found = []
    for root in sorted(Path(SHM).glob(f"{_SHM_PREFIX}*")):
        with contextlib.suppress(OSError, ProtocolError):
            found.append(codec.loads(RunningJob, (root / "job.json").read_bytes()))
    for path in sorted((home() / "local").glob("*/*/status.json")):
        if all(job.state_dir != str(path.parent) for job in found):
            found.append(
                RunningJob(
                    job=path.parent.name,
                    namespace=path.parent.parent.name,
                    state_dir=str(path.parent),
                    pid=0,
                )
            )
    return sorted(found, key=lambda job: (job.namespace, job.job))
