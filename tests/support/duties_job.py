"""A leader's duties in a job of two replicas, by hand: what its sidecars say, and a clock.

For unit tests of duties and orders.
"""

from __future__ import annotations

from typing import Any

from backstay_protocol.control import State
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    Inventory,
    ProgressRequest,
    RankProgress,
    ShardCopy,
    TierState,
)
from backstay_protocol.records import AttemptRecord
from backstay_protocol.topology import (
    MemoryTier,
    Schedule,
    Topology,
)
from backstay_sidecar.restore.duties import Duties
from support.restore_fakes import copy, topology

A = 7_000_002
BASE = CheckpointId(5, 7_000_001)
RECORD = AttemptRecord(
    attempt=A, base=BASE, chain=((7_000_001, 5),), world_size=2, replicas=2, ran=True
)


class Job:
    """Duties of a two-replica job, a clock, and what its sidecars say."""

    def __init__(self, of: Topology | None = None) -> None:
        self.topology = of or topology(2, memory=MemoryTier(schedule=Schedule(every_steps=10)))
        self.duties = Duties(self.topology, 100)
        self.now = 1000.0
        self.step = 10
        self.copies: dict[int, list[ShardCopy]] = {0: [], 1: []}
        self.published: dict[int, list[CheckpointId]] = {0: [], 1: []}
        self.tiers: tuple[TierState, ...] = ()
        self.rank: dict[str, Any] = {}
        self.duties.begin(RECORD, self.now)

    def hear(self, replica: int, **more: Any) -> None:
        rank = RankProgress(
            **{
                "rank": replica,
                "step": self.step,
                "step_time": self.now,
                "published_step": 0,
                "attempt": A,
                "state": State.TRAINING,
                **self.rank,
            }
        )
        request = ProgressRequest(
            **{
                "replica": replica,
                "generation": 7,
                "attempt": A,
                "ranks": (rank,),
                "published": {replica: tuple(self.published.get(replica, ()))},
                "inventory": Inventory(copies=tuple(self.copies.get(replica, ()))),
                "tiers": self.tiers,
                **more,
            }
        )
        self.duties.take(request, self.now)

    def word(self, seconds: float = 0.0, steps: int = 0, waiting: tuple[int, ...] = ()) -> Any:
        """Time and training pass, both sidecars report, the leader speaks."""
        self.now += seconds
        self.step += steps
        for replica in range(2):
            self.hear(replica)
        return self.duties.speak(self.duties.look(self.now, waiting))

    def publish(self, step: int, replicas: tuple[int, ...] = (0, 1)) -> CheckpointId:
        checkpoint = CheckpointId(step, A)
        for replica in replicas:
            self.published[replica].append(checkpoint)
        return checkpoint

    def put(self, step: int, tier: str, replicas: tuple[int, ...] = (0, 1)) -> CheckpointId:
        """Shards of these replicas' ranks; a neighbor copy lies at the other replica."""
        for replica in replicas:
            holder = 1 - replica if tier == "neighbor" else replica
            self.copies[holder].append(copy(step, A, replica, tier, holder))
        return CheckpointId(step, A)


def alone(job: Job, seconds: float, steps: int = 0) -> Any:
    """Time passes, replica 0 alone reports, the leader speaks."""
    job.now += seconds
    job.step += steps
    job.hear(0)
    return job.duties.speak(job.duties.look(job.now))
