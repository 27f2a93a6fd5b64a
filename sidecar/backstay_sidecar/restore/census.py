"""What the sidecars have told of themselves, newest word of each. Used by the leader's duties.

Rebuilt by their next progress after the leader restarts; nothing here is written anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from backstay_protocol.control import State
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import ProgressRequest, RankProgress, ShardCopy, TierState
from backstay_protocol.topology import Topology

FRESH_SECONDS = 10.0
"""A sidecar that was not heard of for so long may be gone with all it holds."""
SMOOTHING = 0.3


@dataclass
class _Heard:
    request: ProgressRequest
    at: float


class Census:
    """One per leader. Times are monotonic seconds, handed in."""

    def __init__(self, topology: Topology) -> None:
        """Knows nothing yet."""
        self._topology = topology
        self._heard: dict[int, _Heard] = {}
        self._pace: dict[int, tuple[int, float, float]] = {}
        """Rank -> (step, its time, smoothed seconds per step)."""
        self._attempt = 0
        self._began = float("-inf")

    def begin(self, attempt: int, now: float) -> None:
        """Another attempt: what ranks did before says nothing about their pace now."""
        self._attempt = attempt
        self._began = now
        self._pace.clear()

    def take(self, request: ProgressRequest, now: float) -> bool:
        """False: the word of a pod that was replaced, or of no replica of this job."""
        known = self._heard.get(request.replica)
        if request.replica not in range(self._topology.replicas):
            return False
        if known is not None and request.generation < known.request.generation:
            return False
        self._heard[request.replica] = _Heard(request, now)
        for rank in request.ranks:
            if rank.attempt == self._attempt:
                self._measure(rank)
        return True

    def requests(self) -> dict[int, ProgressRequest]:
        """Replica -> its newest word."""
        return {replica: heard.request for replica, heard in sorted(self._heard.items())}

    def age(self, replica: int, now: float) -> float:
        """Seconds since the replica was heard of; infinite: never."""
        heard = self._heard.get(replica)
        return now - heard.at if heard else float("inf")

    def all_fresh(self, now: float) -> bool:
        """Whether every sidecar of the job was heard of just now."""
        return all(self.age(i, now) <= FRESH_SECONDS for i in range(self._topology.replicas))

    def silent(self, now: float, limit: float) -> frozenset[int]:
        """Replicas whose sidecar was not heard of for so long in this attempt."""
        since = now - self._began
        return frozenset(
            i
            for i in range(self._topology.replicas)
            if (self.age(i, now) if i in self._heard else since) > limit
        )

    def ranks(self, attempt: int) -> dict[int, RankProgress]:
        """Ranks that are in this attempt."""
        return {
            rank.rank: rank
            for request in self.requests().values()
            for rank in request.ranks
            if rank.attempt == attempt
        }

    def training(self, attempt: int) -> dict[int, RankProgress]:
        """Ranks that train in this attempt, if they are all there and none is at its end."""
        ranks = self.ranks(attempt)
        whole = len(ranks) == self._topology.world_size
        training = all(rank.state == State.TRAINING for rank in ranks.values())
        return ranks if whole and training else {}

    def published(self) -> dict[int, tuple[CheckpointId, ...]]:
        """Rank -> checkpoints in its slots."""
        return {
            rank: checkpoints
            for request in self.requests().values()
            for rank, checkpoints in request.published.items()
        }

    def copies(self) -> list[ShardCopy]:
        """Everything sealed that any sidecar can serve."""
        return [copy for request in self.requests().values() for copy in request.inventory.copies]

    def uploaded(self) -> list[ShardCopy]:
        """What sidecars have put into the remote tier and don't know to be committed."""
        return [copy for request in self.requests().values() for copy in request.uploaded]

    def chains(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Attempt -> chain, from the manifests in sight."""
        return {
            attempt: chain
            for request in self.requests().values()
            for attempt, chain in request.inventory.chains.items()
        }

    def tiers(self, name: str) -> dict[int, TierState]:
        """Replica -> how the tier does there."""
        return {
            replica: state
            for replica, request in self.requests().items()
            for state in request.tiers
            if state.tier == name
        }

    def newest_attempt(self) -> int:
        """Greatest attempt that any sidecar says it is in."""
        return max((request.attempt for request in self.requests().values()), default=0)

    def seconds_per_step(self) -> float:
        """Of the fastest rank; 0: not known yet."""
        known = [pace for _, _, pace in self._pace.values() if pace > 0]
        return min(known, default=0.0)

    def _measure(self, rank: RankProgress) -> None:
        step, time, pace = self._pace.get(rank.rank, (rank.step, rank.step_time, 0.0))
        if rank.step > step and rank.step_time > time > 0:
            now = (rank.step_time - time) / (rank.step - step)
            pace = now if pace == 0 else (1 - SMOOTHING) * pace + SMOOTHING * now
        if rank.rank not in self._pace or rank.step != step:
            self._pace[rank.rank] = (rank.step, rank.step_time, pace)
