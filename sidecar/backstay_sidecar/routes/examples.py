"""One example of each message, for OpenAPI. A test reads each back through the codec."""

from __future__ import annotations

from backstay_protocol.ids import CheckpointId, first_attempt_of
from backstay_protocol.manifest import FORCED, Manifest
from backstay_protocol.messages import (
    BASE_OUTCOME,
    GO,
    LOAD,
    AgentStatus,
    Candidate,
    CaptureNotice,
    CaptureReply,
    CheckpointList,
    CheckpointStatus,
    ConfirmReply,
    ConfirmRequest,
    CopySource,
    Decision,
    FlushReply,
    Inventory,
    JobView,
    JoinReply,
    JoinRequest,
    LeaderDecision,
    Orders,
    Placement,
    Policy,
    ProgressReply,
    ProgressRequest,
    PromiseReply,
    PromiseRequest,
    RankJoin,
    RankProgress,
    RankVerdict,
    ReplicaOffer,
    ReplicaReply,
    ReplicaView,
    RestorePreview,
    RestoreReply,
    RestoreRequest,
    ShardCopy,
    ShardPlan,
    ShardSources,
    Source,
    StoreReply,
    StoreRequest,
    TierPolicy,
    TierState,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.names import LOCAL, MEMORY, NEIGHBOR, REMOTE, URL_SHARD
from backstay_protocol.records import AttemptRecord
from backstay_protocol.topology import Retention, Schedule

_GENERATION = 1_796_000_000
ATTEMPT = first_attempt_of(_GENERATION)
_BEFORE = first_attempt_of(_GENERATION - 100)
CHECKPOINT = CheckpointId(1200, ATTEMPT)
BASE = CheckpointId(900, _BEFORE)
_CHAIN = ((_BEFORE, 900),)
_RUN = "default/char-gpt"
_NONCE = "f3b1c9d2a7e84c51"
_ROUND = "6c1f2f0f5b0e4f0d"
_FINGERPRINT = "9f6b2c54e1d8a3770c2f4be6d1a95e38"
_DIGESTS = ("1c8f0a2b3d4e5f60718293a4b5c6d7e8", "0f1e2d3c4b5a69788796a5b4c3d2e1f0")
_SIZE = 12_345_344

MANIFEST = Manifest(
    run=_RUN,
    step=CHECKPOINT.step,
    attempt=ATTEMPT,
    rank=0,
    world_size=3,
    replica=0,
    plan="5d41402abc4b2a76b9719d911017c592",
    size=_SIZE,
    created=1_796_000_400.0,
    chain=_CHAIN,
    reason=FORCED,
    metadata={"epoch": 3},
    digests=_DIGESTS,
    fingerprint=_FINGERPRINT,
)
COPY = ShardCopy(
    checkpoint=CHECKPOINT,
    rank=0,
    tier=LOCAL,
    holder=0,
    world_size=3,
    plan=MANIFEST.plan,
    size=_SIZE,
    chunk_size=MANIFEST.chunk_size,
    fingerprint=_FINGERPRINT,
)
INVENTORY = Inventory(copies=(COPY,), chains={ATTEMPT: _CHAIN})
RECORD = AttemptRecord(attempt=ATTEMPT, base=BASE, chain=_CHAIN, world_size=3, replicas=3, ran=True)
PROGRESS = RankProgress(
    rank=0,
    step=1210,
    step_time=1_796_000_410.0,
    published_step=1200,
    attempt=ATTEMPT,
    state=3,
    saves=12,
    stall_seconds=0.8,
)
TIER = TierState(tier=LOCAL, newest=CHECKPOINT, newest_time=1_796_000_400.0)

CAPTURE_NOTICE = CaptureNotice(rank=0, slot=1, step=1200, attempt=ATTEMPT, stall_seconds=0.004)
CAPTURE_REPLY = CaptureReply()
RESTORE_REQUEST = RestoreRequest(
    rank=0, local_rank=0, world_size=3, nonce=_NONCE, pid=4711, last_step=1210, last_attempt=ATTEMPT
)
_SHARD = URL_SHARD.format(checkpoint=BASE, rank=0)
RESTORE_REPLY = RestoreReply(
    status=LOAD,
    message="the newest checkpoint on the lineage with a source for every shard",
    decision=Decision(
        round=_ROUND,
        serial=0,
        attempt=ATTEMPT,
        base=BASE,
        saved_world_size=3,
        plan=MANIFEST.plan,
        chain=_CHAIN,
        shards=(
            ShardSources(
                rank=0,
                size=_SIZE,
                chunk_size=MANIFEST.chunk_size,
                fingerprint=_FINGERPRINT,
                sources=(
                    Source(
                        tier=LOCAL,
                        holder=1,
                        url=f"http://10.0.0.8:7070{_SHARD}?tier=local",
                        manifest_url=f"http://10.0.0.8:7070{_SHARD}/manifest?tier=local",
                    ),
                ),
            ),
        ),
    ),
    run=_RUN,
    tiers=(MEMORY, LOCAL, NEIGHBOR, REMOTE),
)
CONFIRM_REQUEST = ConfirmRequest(
    rank=0, nonce=_NONCE, round=_ROUND, serial=0, ok=True, bytes_by_tier={LOCAL: _SIZE}
)
CONFIRM_REPLY = ConfirmReply(status=GO, bytes_by_tier={LOCAL: 3 * _SIZE}, lost_steps=10)

STATUS = AgentStatus(run=_RUN, replica=0, attempt=ATTEMPT, generation=_GENERATION, tiers=(TIER,))
CHECKPOINT_STATUS = CheckpointStatus(
    checkpoint=CHECKPOINT,
    world_size=3,
    complete_in=(LOCAL, REMOTE),
    present_in={LOCAL: 3, REMOTE: 3},
    durable=True,
    pinned=False,
    on_lineage=True,
    size=3 * _SIZE,
    created=1_796_000_400.0,
)
CHECKPOINT_LIST = CheckpointList(run=_RUN, attempt=ATTEMPT, checkpoints=(CHECKPOINT_STATUS,))

REPLICA_OFFER = ReplicaOffer(
    checkpoint=CHECKPOINT,
    rank=0,
    owner=0,
    address="10.0.0.7:7070",
    attempt=ATTEMPT,
    manifest={"run": _RUN, "step": CHECKPOINT.step, "...": "the sealed manifest"},
)
REPLICA_REPLY = ReplicaReply(status="pulling")
PROMISE_REQUEST = PromiseRequest(round=_ROUND, attempt=ATTEMPT, members={0: _GENERATION})
PROMISE_REPLY = PromiseReply(
    granted=True, known=_BEFORE, record=RECORD, in_line=True, inventory=INVENTORY
)
STORE_REQUEST = StoreRequest(round=_ROUND, record=RECORD)
STORE_REPLY = StoreReply(stored=True)

JOIN_REQUEST = JoinRequest(
    replica=0,
    generation=_GENERATION,
    current={0: _GENERATION},
    replaces=0,
    uid="0b5e8f5e",
    address="10.0.0.7:7070",
    ranks=(RankJoin(rank=0, local_rank=0, nonce=_NONCE, world_size=3),),
)
JOIN_REPLY = JoinReply(
    status=LOAD,
    decision=LeaderDecision(
        round=_ROUND,
        serial=0,
        attempt=ATTEMPT,
        base=BASE,
        saved_world_size=3,
        plan=MANIFEST.plan,
        chain=_CHAIN,
        shards=(
            ShardPlan(
                rank=0,
                size=_SIZE,
                chunk_size=MANIFEST.chunk_size,
                fingerprint=_FINGERPRINT,
                sources=(CopySource(tier=LOCAL, holder=1),),
            ),
        ),
        nonces={0: _NONCE},
    ),
)
VERDICT_REQUEST = VerdictRequest(
    replica=0,
    round=_ROUND,
    serial=0,
    verdicts=(RankVerdict(rank=0, nonce=_NONCE, ok=True, bytes_by_tier={LOCAL: _SIZE}),),
)
VERDICT_REPLY = VerdictReply(status=GO, record=RECORD, bytes_by_tier={LOCAL: 3 * _SIZE})
PROGRESS_REQUEST = ProgressRequest(
    replica=0,
    generation=_GENERATION,
    attempt=ATTEMPT,
    ranks=(PROGRESS,),
    published={0: (CHECKPOINT,)},
    inventory=INVENTORY,
    tiers=(TIER,),
    seen_version=41,
    wait_seconds=2.0,
)
PROGRESS_REPLY = ProgressReply(
    attempt=ATTEMPT,
    version=42,
    complete={LOCAL: (CHECKPOINT,)},
    durable=(BASE,),
    complete_step=1200,
    orders=Orders(every_steps=100),
    neighbors={0: 1, 1: 2, 2: 0},
    addresses={0: "10.0.0.7:7070"},
)
JOB = JobView(
    run=_RUN,
    attempt=ATTEMPT,
    phase="Training",
    message="",
    step=1210,
    replicas=(
        ReplicaView(
            replica=0,
            generation=_GENERATION,
            address="10.0.0.7:7070",
            seen_seconds_ago=0.4,
            ranks=(PROGRESS,),
            tiers=(TIER,),
        ),
    ),
    tiers=(TIER,),
    newest_durable=BASE,
)
RESTORE_PREVIEW = RestorePreview(
    run=_RUN,
    attempt=ATTEMPT,
    outcome=BASE_OUTCOME,
    reason=f"step 1200 of attempt {ATTEMPT} is the newest checkpoint on the lineage of attempt "
    f"{ATTEMPT} for whose every shard there is a source",
    checkpoint=CHECKPOINT,
    candidates=(
        Candidate(
            checkpoint=CHECKPOINT,
            taken=True,
            why=f"Step 1200 of attempt {ATTEMPT} is the newest checkpoint on the lineage",
            tiers=(LOCAL, REMOTE),
        ),
        Candidate(
            checkpoint=BASE,
            taken=False,
            why="Whole, but older than step 1200, which was taken",
            tiers=(REMOTE,),
        ),
    ),
)
_TIER = TierPolicy(schedule=Schedule(every_steps=500), retention=Retention(keep_last=3))
POLICY = Policy(
    every_steps=50,
    effective_from=1300,
    tiers={MEMORY: TierPolicy(schedule=Schedule(every_steps=50)), LOCAL: _TIER, REMOTE: _TIER},
)
PLACEMENT = Placement(
    nodes={0: "node-a", 1: "node-b", 2: "node-c"}, domains={0: "rack-1", 1: "rack-1", 2: "rack-2"}
)
FLUSH_REPLY = FlushReply(step=1215, durable=False, message="the save at step 1215 is on its way")
