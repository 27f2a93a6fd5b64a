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
        self._doubted_until = float("-inf")
        self._moved_at = float("-inf")
        self._seen: dict[int, tuple[int, int, float]] = {}
        """Rank -> (state, step, its time) when it moved last in this attempt. Times of other
        machines are only compared with themselves: another one means another step."""

    def begin(self, attempt: int, now: float) -> None:
        """Another attempt: what ranks did before says nothing about their pace now."""
        self._attempt = attempt
        self._began = self._moved_at = now
        self._pace.clear()
        self._seen.clear()

    def woke(self, now: float, notice_seconds: float) -> None:
        """The leader itself did not run for a while: what it hears next may have waited since then.

        For `notice_seconds` no word counts as fresh, and nobody is said to stand still yet.
        """
        self._doubted_until = now + notice_seconds
        self._moved_at = now

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
                self._see(rank, now)
        return True

    def generation(self, replica: int) -> int:
        """Of the newest pod of the replica that was heard; 0: none was."""
        heard = self._heard.get(replica)
        return heard.request.generation if heard else 0

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

    def all_heard(self) -> bool:
        """Whether every sidecar of the job has ever told this leader something."""
        return len(self._heard) == self._topology.replicas

    @property
    def moved_at(self) -> float:
        """When this leader last saw a step or a state of any rank change, by its own clock."""
        return self._moved_at

    @property
    def was_whole(self) -> bool:
        """Whether every rank was ever seen in the attempt."""
        return len(self._seen) == self._topology.world_size

    def heard_since(self, when: float) -> bool:
        """Whether every sidecar of the job was heard of at that time or later."""
        heard = self._heard
        return all(i in heard and heard[i].at >= when for i in range(self._topology.replicas))

    def silent(self, now: float, limit: float) -> frozenset[int]:
        """Replicas whose sidecar was not heard of for so long in this attempt."""
        since = now - self._began
        return frozenset(
            i
            for i in range(self._topology.replicas)
            if (self.age(i, now) if i in self._heard else since) > limit
            or (i in self._heard and self._heard[i].at < self._doubted_until)
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

    def nodes(self) -> dict[int, str]:
        """Replica -> its node, of those that know it."""
        known = self.requests().items()
        return {replica: request.node for replica, request in known if request.node}

    def seconds_per_step(self) -> float:
        """Of the fastest rank; 0: not known yet."""
        known = [pace for _, _, pace in self._pace.values() if pace > 0]
        return min(known, default=0.0)

    def _see(self, rank: RankProgress, now: float) -> None:
        state, step, time = self._seen.get(rank.rank, (-1, -1, 0.0))
        if rank.state != state or rank.step > step or rank.step_time != time:
            self._seen[rank.rank] = (rank.state, rank.step, rank.step_time)
            self._moved_at = now

    def _measure(self, rank: RankProgress) -> None:
        step, time, pace = self._pace.get(rank.rank, (rank.step, rank.step_time, 0.0))
        if rank.step > step and rank.step_time > time > 0:
            now = (rank.step_time - time) / (rank.step - step)
            pace = now if pace == 0 else (1 - SMOOTHING) * pace + SMOOTHING * now
        if rank.rank not in self._pace or rank.step != step:
            self._pace[rank.rank] = (rank.step, rank.step_time, pace)
