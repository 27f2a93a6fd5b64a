"""What people, operator and runner see of a job: GET /v1/job and /v1/checkpoints. No I/O.

Used by the leader. Built from what duties and the round driver know, each time it is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from backstay_protocol.completeness import complete
from backstay_protocol.control import State
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    CheckpointList,
    CheckpointStatus,
    JobView,
    LastWord,
    ProgressReply,
    ReplicaView,
    RestoreView,
    ShardCopy,
    TierState,
)
from backstay_protocol.names import LOCAL, MEMORY, REMOTE, TIERS
from backstay_protocol.round_events import STOOD_DOWN
from backstay_protocol.rounds import Phase, Round
from backstay_protocol.topology import Topology
from backstay_sidecar.restore.census import FRESH_SECONDS
from backstay_sidecar.restore.duties import Duties

JOINING = "Joining"
RESTORING = "Restoring"
TRAINING = "Training"
FINISHED = "Finished"
FAILED = "Failed"
NEVER_SEEN = 1e9
FEW_SKIPS = 3
"""So many skipped saves may happen to anybody (probation, a busy slot)."""
SHOWN_WARNINGS = 10


def phase(duties: Duties, current: Round, waiting: bool, topology: Topology) -> tuple[str, str]:
    """(phase, message)."""
    world = topology.world_size
    if current.give_up is not None and not current.give_up.retry:
        return FAILED, current.give_up.why
    if waiting:
        gathering = current.phase in (Phase.GATHER, Phase.ENDED)
        if not gathering:
            return RESTORING, current.message
        joined = f"{len(current.nonces)} of {world} ranks have called restore()"
        return JOINING, f"{joined}; {current.message}" if current.message else joined
    if not duties.attempt:
        return JOINING, "no rank has called restore() yet"
    states = [rank.state for rank in duties.census.ranks(duties.attempt).values()]
    if len(states) < world and duties.census.was_whole:
        left = world - len(states)
        return JOINING, f"{left} of {world} ranks start again; none has called restore() yet"
    if len(states) == world and all(state == State.FINISHED for state in states):
        return FINISHED, "all ranks have come to their end"
    return TRAINING, duties.word.message


def is_flushed(view: JobView) -> bool:
    """Whether nothing is left to bring out: all sidecars were heard just now and have looked at
    their disks, and nothing newer than the newest durable checkpoint is in sight, not even a part
    of one (the rest may lie in another tier).
    """
    replicas = view.replicas
    if not view.attempt or any(r.seen_seconds_ago > FRESH_SECONDS for r in replicas):
        return False
    if any(tier.tier == LOCAL and not tier.ok for r in replicas for tier in r.tiers):
        return False
    there = [view.newest_copy, *(tier.newest for tier in view.tiers)]
    newest = max((checkpoint.step for checkpoint in there if checkpoint is not None), default=-1)
    return view.newest_durable is not None and view.newest_durable.step >= newest


def last_word(word: ProgressReply, own: Iterable[int]) -> LastWord | None:
    """What is known of the last checkpoint by the leader's word and the steps of which something
    lies here.
    """
    steps = {c.step for there in word.complete.values() for c in there} | set(own)
    if not steps:
        return None
    durable = max((checkpoint.step for checkpoint in word.durable), default=-1)
    return LastWord(newest_step=max(steps), durable_step=durable)


def tier_states(
    duties: Duties, topology: Topology, learned: dict[str, float], away: tuple[str, str] = ("", "")
) -> list[TierState]:
    """Each configured tier over all replicas: the first trouble, the longest view.

    `away`: why a round that is under way can't use the remote tier, and the TIER_ code of it.
    """
    found = []
    for name in TIERS:
        if getattr(topology.tiers, name) is None:
            continue
        states = duties.census.tiers(name)
        sick = [(f"replica {i}: {s.message}", s.code) for i, s in states.items() if not s.ok]
        leaders = away if away[0] else (duties.remote.trouble, duties.remote.trouble_code)
        if name == REMOTE and leaders[0]:
            sick.insert(0, (f"leader: {leaders[0]}", leaders[1]))
        there = duties.word.complete.get(name, ())
        found.append(
            TierState(
                tier=name,
                ok=not sick,
                message=sick[0][0] if sick else "",
                code=sick[0][1] if sick else "",
                newest=there[0] if there else None,
                newest_time=learned.get(name, 0.0),
                backlog=sum(state.backlog for state in states.values()),
            )
        )
    return found


def job_view(
    *,
    topology: Topology,
    duties: Duties,
    current: Round,
    waiting: bool,
    restores: tuple[RestoreView, ...],
    learned: dict[str, float],
    now: float,
    away: tuple[str, str] = ("", ""),
) -> JobView:
    """GET /v1/job. `learned`: tier -> when its newest complete checkpoint was heard of; `away`: see
    tier_states.
    """
    name, message = phase(duties, current, waiting, topology)
    look = duties.look(now, current.joins if waiting else ())
    unheeded, since = duties.orders.unheeded(look) if duties.orders is not None else ((), 0.0)
    given_up = current.give_up if name == FAILED else None
    ranks = duties.census.ranks(duties.attempt) if duties.attempt else {}
    requests = duties.census.requests()
    replicas = tuple(
        ReplicaView(
            replica=replica,
            generation=requests[replica].generation if replica in requests else 0,
            address=duties.word.addresses.get(replica, topology.address_of(replica)),
            seen_seconds_ago=min(duties.census.age(replica, now), NEVER_SEEN),
            ranks=requests[replica].ranks if replica in requests else (),
            tiers=requests[replica].tiers if replica in requests else (),
        )
        for replica in range(topology.replicas)
    )
    durable = duties.word.durable
    return JobView(
        run=topology.run,
        attempt=duties.attempt,
        phase=name,
        message=message,
        step=min((rank.step for rank in ranks.values()), default=0),
        replicas=replicas,
        tiers=tuple(tier_states(duties, topology, learned, away)),
        restores=restores,
        newest_durable=durable[0] if durable else None,
        newest_copy=duties.newest_copy,
        warnings=_warnings(duties, topology),
        code=given_up.code if given_up is not None else "",
        outranked_by=current.known if given_up is not None and given_up.code == STOOD_DOWN else 0,
        quiet_seconds=duties.quiet_seconds(now),
        step_seconds=duties.census.seconds_per_step(),
        unheeded=unheeded,
        unheeded_seconds=since,
        policy=duties.standing.newest if duties.standing.settled else None,
        placement=duties.placement,
        neighbors=duties.ring.neighbors,
        same_node=duties.ring.same_node,
        same_domain=duties.ring.same_domain,
    )


def _warnings(duties: Duties, topology: Topology) -> tuple[str, ...]:
    found = []
    if topology.tiers.remote is None:
        found.append("there is no remote tier: nothing outlives the loss of all nodes")
    if duties.superseded:
        found.append(f"attempt {duties.superseded} has replaced this world")
    if duties.word.message:
        found.append(duties.word.message)
    found.extend(_skipping(duties))
    return tuple(found)


def _skipping(duties: Duties) -> list[str]:
    """Ranks that skip a good part of their saves: what is kept grows old."""
    ranks = duties.census.ranks(duties.attempt) if duties.attempt else {}
    return [
        f"rank {rank.rank} skipped {rank.skipped} of {rank.skipped + rank.saves} saves, the newest "
        f"it has is of step {rank.published_step}; its log and the event save_skipped say why"
        for rank in ranks.values()
        if rank.skipped >= FEW_SKIPS and rank.skipped >= rank.saves
    ][:SHOWN_WARNINGS]


def checkpoint_list(topology: Topology, duties: Duties) -> CheckpointList:
    """GET /v1/checkpoints, newest first: everything of which anything is known."""
    copies = [*duties.census.copies(), *duties.remote.copies, *duties.census.uploaded()]
    grouped: dict[CheckpointId, list[ShardCopy]] = defaultdict(list)
    for copy in copies:
        grouped[copy.checkpoint].append(copy)
    for published in duties.census.published().values():
        for checkpoint in published:
            grouped.setdefault(checkpoint, [])
    for checkpoint in duties.remote.commits:
        grouped.setdefault(checkpoint, [])
    return CheckpointList(
        run=topology.run,
        attempt=duties.attempt,
        checkpoints=tuple(
            _status(checkpoint, grouped[checkpoint], duties)
            for checkpoint in sorted(grouped, reverse=True)
        ),
    )


def _status(checkpoint: CheckpointId, copies: list[ShardCopy], duties: Duties) -> CheckpointStatus:
    by_tier: dict[str, list[ShardCopy]] = defaultdict(list)
    for copy in copies:
        by_tier[copy.tier].append(copy)
    published = sum(checkpoint in there for there in duties.census.published().values())
    present = {tier: len({c.rank for c in found}) for tier, found in by_tier.items()}
    present[MEMORY] = max(present.get(MEMORY, 0), published)
    going = checkpoint in duties.remote.intents
    commit = None if going else duties.remote.commits.get(checkpoint)
    whole = {tier for tier, found in by_tier.items() if checkpoint in complete(found)}
    if checkpoint in duties.word.complete.get(MEMORY, ()):
        whole.add(MEMORY)
    sizes = {c.rank: c.size for c in copies}
    if commit is not None:  # its record stands for its shards, whoever uploaded them
        whole.add(REMOTE)
        sizes.update({shard.rank: shard.size for shard in commit.shards})
        present[REMOTE] = commit.world_size
    if going:
        whole.discard(REMOTE)
        present.pop(REMOTE, None)
    lineage = duties.lineage
    return CheckpointStatus(
        checkpoint=checkpoint,
        world_size=max((c.world_size for c in copies), default=commit.world_size if commit else 0),
        complete_in=tuple(tier for tier in TIERS if tier in whole),
        present_in={tier: present[tier] for tier in TIERS if present.get(tier)},
        durable=commit is not None,
        pinned=checkpoint in duties.pinned(),
        on_lineage=lineage is not None and lineage.contains(checkpoint),
        size=sum(sizes.values()),
        created=commit.created if commit else 0.0,
    )


def find_checkpoint(name: str, found: CheckpointList) -> CheckpointId:
    """`<step>-<attempt>`, a bare step, or `latest` (both: on the lineage). Raises ValueError."""
    history = [s for s in found.checkpoints if s.on_lineage and s.complete_in]
    if name == "latest":
        if not history:
            raise ValueError("there is no complete checkpoint on the lineage yet")
        return history[0].checkpoint
    if name.isdigit():
        for status in history:
            if status.checkpoint.step == int(name):
                return status.checkpoint
        raise ValueError(f"no complete checkpoint of step {name} is on the lineage")
    return CheckpointId.parse(name)
