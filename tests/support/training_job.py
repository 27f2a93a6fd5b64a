"""A whole small job without a runner: sidecars, ranks, and restarts as a kubelet does them.

    with TrainingJob(tmp_path, replicas=3) as job:
        job.start()
        job.wait_step(6)
        job.kill_rank(1)
        job.finish()

A rank that dies takes the others with it (as torchrun does): all start again on the same volumes. A
sidecar that dies is started again. Faults given for a process are armed in its first life only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from backstay_protocol import codec
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.messages import CheckpointList, JobView
from backstay_protocol.names import (
    ENV_EXIT_WITH_PARENT,
    ENV_FAULTS,
    ENV_REPLICA,
    ENV_S3_ACCESS_KEY,
    ENV_S3_SECRET_KEY,
    ENV_VOLUME,
    TIERS,
    URL_CHECKPOINTS,
    URL_JOB,
)
from backstay_protocol.topology import (
    LocalTier,
    ManualChoice,
    MemoryTier,
    NeighborTier,
    PodIdentity,
    RemoteTier,
    RestoreOptions,
    Retention,
    Schedule,
    Tiers,
)
from support.nursery import Rank, nursery
from support.sidecar import SidecarJob

PATIENCE = 120.0
FIRST_GENERATION = 1000


def every_tier(
    disk: Path,
    *,
    every: int = 2,
    endpoint: str = "",
    bucket: str = "",
    neighbor: bool = True,
    slots: int = 2,
    keep_last: int = 2,
) -> Tiers:
    """Memory each `every` steps and all that is asked for beside it, on the same schedule."""
    remote = RemoteTier(endpoint=endpoint, bucket=bucket, prefix="jobs") if endpoint else None
    return Tiers(
        memory=MemoryTier(schedule=Schedule(every_steps=every), slots=slots),
        local=LocalTier(root=str(disk), retention=Retention(keep_last=keep_last)),
        neighbor=NeighborTier() if neighbor else None,
        remote=remote,
    )


@dataclass
class TrainingJob:
    """Sidecars and ranks of one job."""

    folder: Path
    replicas: int = 2
    per_replica: int = 1
    steps: int = 12
    kind: str = "ddp"
    step_seconds: float = 0.05
    tiers: Tiers | None = None
    arguments: tuple[str, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)
    """Rank -> fault points of its first life."""
    restore: RestoreOptions = field(default_factory=lambda: RestoreOptions(barrier_seconds=60))
    s3_keys: tuple[str, str] = ("", "")
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside that, for sidecars and ranks."""
    topology_fields: Mapping[str, Any] = field(default_factory=dict)
    build: str = ""
    """Of the ranks: where another build's packages are, as in PYTHONPATH."""
    namespace: str = "test"
    run_name: str = "run"
    clock = SYSTEM_CLOCK

    def __enter__(self) -> TrainingJob:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.out = self.folder / "out"
        self.out.mkdir(exist_ok=True)
        self._generations = dict.fromkeys(range(self.replicas), FIRST_GENERATION)
        self.sidecars = SidecarJob(
            self.folder,
            replicas=self.replicas,
            per_replica=self.per_replica,
            tiers=self.tiers or every_tier(self.folder / "disk", neighbor=self.replicas > 1),
            generations=dict(self._generations),
            namespace=self.namespace,
            run_name=self.run_name,
            topology_fields={
                "restore": self.restore,
                "first_generation": FIRST_GENERATION,
                **self.topology_fields,
            },
            env={
                ENV_S3_ACCESS_KEY: self.s3_keys[0],
                ENV_S3_SECRET_KEY: self.s3_keys[1],
                **self.env,
            },
        )
        self.sidecars.__enter__()
        self._ranks: dict[int, Rank] = {}
        self._armed = dict(self.faults)
        self.restarts = 0
        self.buried: dict[int, int] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_ranks()
        self.sidecars.__exit__()

    @property
    def world_size(self) -> int:
        return self.replicas * self.per_replica

    # --- starting -----------------------------------------------------------------------------

    def start(self, sidecar_faults: Mapping[int, str] | None = None) -> None:
        """Sidecars, then ranks."""
        for replica in range(self.replicas):
            faults = (sidecar_faults or {}).get(replica, "")
            self.sidecars.start(replica, faults=faults)
        self.start_ranks()

    def rearm(self, faults: Mapping[int, str]) -> None:
        """Fault points for the next life of these ranks."""
        self._armed = dict(faults)

    def start_ranks(self) -> None:
        """All ranks of one world, on a fresh rendezvous port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            self._ranks[rank] = self._spawn(rank, port)

    def _spawn(self, rank: int, port: int) -> Rank:
        replica = rank // self.per_replica
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.per_replica),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            ENV_VOLUME: self.sidecars.memory(replica).root,
            ENV_REPLICA: str(replica),
            ENV_EXIT_WITH_PARENT: "1",
            ENV_FAULTS: self._armed.pop(rank, ""),
            **self.env,
        }
        arguments = [
            "--out", str(self.out), "--kind", self.kind, "--steps", str(self.steps),
            "--step-seconds", str(self.step_seconds), *self.arguments,
        ]  # fmt: skip
        return nursery(self.build).start(arguments, env=env, log=self.folder / f"rank-{rank}.log")

    def choose_again(self, choice: ManualChoice | None) -> None:
        """The job's `restore` changes, and sidecars and ranks start anew."""
        self.kill_ranks()
        self.sidecars.choose(choice)
        for replica in range(self.replicas):
            self.sidecars.kill(replica)
            self.sidecars.start(replica)
        self.start_ranks()

    # --- failing ------------------------------------------------------------------------------

    def kill_rank(self, rank: int) -> None:
        """kill -9 of one rank; `finish` or `wait_step` brings the world back."""
        self._ranks[rank].send_signal(signal.SIGKILL)

    def kill_ranks(self) -> None:
        for process in self._ranks.values():
            if process.poll() is None:
                process.kill()
        for process in self._ranks.values():
            process.wait(30)
        self._ranks.clear()

    def lose_node(self, replica: int, *, disk: bool) -> None:
        """Everything of the replica goes: processes, memory, and with `disk` its disk too.

        The next pod of the replica is another one, with a generation of its own.
        """
        self.kill_ranks()
        self.sidecars.kill(replica)
        self.sidecars.wipe_memory(replica)
        if disk:
            self.sidecars.wipe_disk(replica)
        self._new_pod(replica)

    def _new_pod(self, replica: int) -> None:
        """What an operator does before it creates a replacement."""
        old = self._generations[replica]
        self._generations[replica] = max(self._generations.values()) + 1
        pod = PodIdentity(
            replica=replica,
            generation=self._generations[replica],
            current=dict(self._generations),
            replaces=old,
            uid=f"pod-{replica}-{self._generations[replica]}",
        )
        (self.folder / f"pod-{replica}.json").write_bytes(codec.dumps(pod))

    # --- waiting ------------------------------------------------------------------------------

    def tend(self) -> None:
        """One look of the kubelet: dead sidecars and a broken world are started again."""
        for replica in range(self.replicas):
            if not self.sidecars.alive(replica):
                self._bury(replica)
                self.sidecars.start(replica)
        codes = {rank: process.poll() for rank, process in self._ranks.items()}
        if any(code not in (None, 0) for code in codes.values()):
            self.kill_ranks()
            self.restarts += 1
            assert self.restarts < 8, f"the world breaks again and again\n{self.logs()}"
            self.start_ranks()

    def _bury(self, replica: int) -> None:
        if replica in self.sidecars._processes:
            self.buried[replica] = self.sidecars.wait_dead(replica)

    def wait(self, condition: Callable[[], Any], what: str, *, tend: bool = True) -> Any:
        """Until `condition` gives something true."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.logs()}"
            if tend:
                self.tend()
            time.sleep(0.05)
        return found

    def wait_step(self, step: int) -> None:
        """Until every rank has made this step (in any life)."""
        ranks = range(self.world_size)
        self.wait(
            lambda: all(step in [e["step"] for e in self.events(r, "step")] for r in ranks),
            f"step {step} of every rank",
        )

    def wait_complete(self, tier: str, step: int) -> None:
        """Until a checkpoint of at least this step is complete in the tier."""
        self.wait(
            lambda: any(
                c.checkpoint.step >= step and tier in c.complete_in for c in self.checkpoints()
            ),
            f"step {step} complete in {tier}",
        )

    def finish(self) -> None:
        """Until all ranks have ended well."""
        self.wait(
            lambda: self._ranks and all(p.poll() == 0 for p in self._ranks.values()),
            "the job to finish",
        )

    def wait_failed(self) -> None:
        """Until a rank has ended badly; nothing is started again."""
        self.wait(
            lambda: any(p.poll() not in (None, 0) for p in self._ranks.values()),
            "a rank to fail",
            tend=False,
        )

    # --- looking ------------------------------------------------------------------------------

    def events(self, rank: int, kind: str = "") -> list[dict[str, Any]]:
        """What a rank logged, over all its lives."""
        path = self.out / f"events-{rank}.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if not kind or event["kind"] == kind]

    def restored(self, life: int = -1) -> list[dict[str, Any]]:
        """The restore of every rank in one of its lives (only those that got that far count)."""
        return [self.events(rank, "restored")[life] for rank in range(self.world_size)]

    def assert_same_restore(self, life: int = -1) -> tuple[int, int]:
        """All ranks began that life from one step under one attempt; returns both."""
        points = {(event["step"], event["attempt"]) for event in self.restored(life)}
        assert len(points) == 1, points
        return points.pop()

    def tiers_read(self, life: int = -1) -> set[str]:
        """Every tier that any rank read from."""
        return {
            tier
            for event in self.restored(life)
            for tier in TIERS
            if event["sources"].get(tier, 0) > 0
        }

    def checkpoints(self) -> CheckpointList | tuple[()]:
        try:
            answer = self.sidecars.request(0, "GET", URL_CHECKPOINTS, timeout=5)
        except OSError:
            return ()
        return answer.read(CheckpointList).checkpoints if answer.status == 200 else ()

    def job(self) -> JobView:
        view: JobView = self.sidecars.request(0, "GET", URL_JOB).read(JobView)
        return view

    def final(self, rank: int = 0) -> dict[str, torch.Tensor]:
        return load_file(self.out / f"final-{rank}.safetensors")

    def logs(self) -> str:
        paths = [
            *sorted(self.folder.glob("rank-*.log")),
            *sorted(self.folder.glob("sidecar-*.log")),
        ]
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in paths)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    different = [k for k in left if not torch.equal(left[k].cpu(), right[k].cpu())]
    assert not different, f"not equal: {different}"


def undisturbed_states(folder: Path, steps: int) -> list[dict[str, torch.Tensor]]:
    """The last state of each rank of a job of so many steps when nothing happens to it."""
    with TrainingJob(folder, steps=steps, step_seconds=0.0) as job:
        job.start()
        job.finish()
        return [job.final(rank) for rank in range(job.world_size)]
