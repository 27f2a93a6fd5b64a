"""The leader's work in the remote tier: claims, commits, adoption, retention, owners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from backstay_protocol import codec
from backstay_protocol.errors import Unreachable
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import RemoteLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import Inventory, ProgressRequest
from backstay_protocol.records import AttemptRecord, Claim, CommitRecord, Intent
from backstay_protocol.topology import RemoteTier, Retention
from backstay_sidecar.restore.duties import Duties
from backstay_sidecar.restore.remote_book import ClaimTaken, RemoteBook, RunOwnedElsewhere
from backstay_sidecar.restore.remote_duties import RemoteDuties
from support.restore_fakes import Events, FakeClock, FakeStore, copy, remote_tier, topology

A = 7_000_002
BASE = CheckpointId(5, 7_000_001)
RECORD = AttemptRecord(attempt=A, base=BASE, chain=((7_000_001, 5),), world_size=2, ran=True)
LAYOUT = RemoteLayout("p", "default/run")
DAY = 24 * 3600.0


def manifest(checkpoint: CheckpointId, rank: int, fingerprint: str = "") -> Manifest:
    return Manifest(
        run="default/run",
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        rank=rank,
        world_size=2,
        replica=rank,
        plan="plan",
        size=100,
        chunk_size=64,
        created=1.0,
        chain=() if checkpoint.attempt != A else RECORD.chain,
        digests=("d", "d"),
        fingerprint=fingerprint or f"{checkpoint.step}-{checkpoint.attempt}-{rank}",
    )


class Remote:
    """A bucket, a leader's duties, and its work there."""

    def __init__(self, keep_last: int = 2) -> None:
        tier = remote_tier()
        self.topology = topology(
            2,
            remote=RemoteTier(
                endpoint=tier.endpoint,
                bucket=tier.bucket,
                prefix="p",
                retention=Retention(keep_last=keep_last),
            ),
        )
        self.sweeps = 0
        self.sweep_error: Exception | None = None
        self.store = FakeStore()
        self.clock = FakeClock()
        self.events = Events()
        self.duties = Duties(self.topology, 1)
        self.duties.begin(RECORD, self.clock.now)
        self.book = RemoteBook(self.store, LAYOUT, "default/run", "local/uid", self.clock)
        self.leader = RemoteDuties(
            topology=self.topology,
            book=self.book,
            duties=self.duties,
            clock=self.clock,
            emit=self.events,
            learned=lambda: None,
            resting=lambda: False,
            round_of=lambda _: "r",
            sweep=self.sweep,
        )

    def sweep(self) -> int:
        self.sweeps += 1
        if self.sweep_error is not None:
            raise self.sweep_error
        return 3

    def claim(
        self, attempt: int = A, base: bool = True, round_name: str = "r", owner: str = "local/uid"
    ) -> None:
        claim = Claim(attempt=attempt, round=round_name, owner=owner, created=1.0)
        self.store.objects[LAYOUT.claim(attempt)] = codec.dumps(claim)
        if base:
            self.store.objects[LAYOUT.base(attempt)] = codec.dumps(replace(RECORD, ran=False))

    def put(self, checkpoint: CheckpointId, ranks: tuple[int, ...] = (0, 1), **more: Any) -> None:
        for rank in ranks:
            self.store.objects[LAYOUT.shard(checkpoint, rank)] = b"x" * 100
            self.store.objects[LAYOUT.manifest(checkpoint, rank)] = manifest(
                checkpoint, rank, **more
            ).to_json()

    def uploaded(self, checkpoint: CheckpointId) -> None:
        """The sidecars say that they have put it."""
        self.put(checkpoint)
        for rank in range(2):
            shard = copy(checkpoint.step, checkpoint.attempt, rank, "remote", -1)
            request = ProgressRequest(replica=rank, generation=7, attempt=A, uploaded=(shard,))
            self.duties.take(request, self.clock.now)

    def commit(self, checkpoint: CheckpointId) -> None:
        self.put(checkpoint)
        record = CommitRecord(
            checkpoint=checkpoint,
            world_size=2,
            plan="plan",
            chunk_size=64,
            chain=RECORD.chain if checkpoint.attempt == A else (),
            shards=(),
            created=1.0,
        )
        self.store.objects[LAYOUT.commit(checkpoint)] = codec.dumps(record)

    def has(self, checkpoint: CheckpointId) -> bool:
        return any(key.startswith(LAYOUT.folder(checkpoint)) for key in self.store.objects)

    def committed(self, checkpoint: CheckpointId) -> bool:
        return LAYOUT.commit(checkpoint) in self.store.objects

    async def passes(self, count: int = 1) -> None:
        """Let the leader work; a listing is due each time."""
        for _ in range(count):
            self.clock.now += 61
            await self.leader.pass_once()


@pytest.fixture
def remote() -> Iterator[Remote]:
    with opened() as made:
        yield made


@contextmanager
def opened(**more: Any) -> Iterator[Remote]:
    made = Remote(**more)
    try:
        yield made
    finally:
        made.book.close()


def step(number: int) -> CheckpointId:
    return CheckpointId(number, A)


async def test_what_all_sidecars_have_uploaded_is_committed(remote: Remote) -> None:
    remote.claim()
    await remote.passes()
    remote.uploaded(step(10))
    await remote.passes()
    record = codec.loads(CommitRecord, remote.store.objects[LAYOUT.commit(step(10))])
    assert [shard.rank for shard in record.shards] == [0, 1]
    assert record.chain == RECORD.chain
    assert step(10) in remote.duties.remote.commits


async def test_a_checkpoint_that_lacks_a_shard_is_not_committed(remote: Remote) -> None:
    remote.claim()
    remote.put(step(10), ranks=(0,))
    await remote.passes()
    assert not remote.committed(step(10))


async def test_what_lies_complete_but_unmarked_on_the_lineage_is_adopted(remote: Remote) -> None:
    remote.claim()
    remote.put(BASE)
    off = CheckpointId(9, 7_000_001)  # after the step at which the chain leaves it
    remote.put(off)
    await remote.passes()
    assert remote.committed(BASE)
    assert not remote.committed(off)


async def test_a_shard_that_differs_from_the_copy_a_sidecar_holds_is_not_adopted(
    remote: Remote,
) -> None:
    remote.claim()
    remote.put(BASE)
    held = copy(BASE.step, BASE.attempt, 0, "local", 0, fingerprint="other bytes")
    remote.duties.take(
        ProgressRequest(replica=0, generation=7, attempt=A, inventory=Inventory(copies=(held,))),
        remote.clock.now,
    )
    await remote.passes()
    assert not remote.committed(BASE)


async def test_an_attempt_that_began_while_the_store_was_away_claims_late(remote: Remote) -> None:
    remote.store.away = "away"
    with pytest.raises(Unreachable):
        await remote.passes()
    remote.store.away = ""
    await remote.passes()
    assert LAYOUT.claim(A) in remote.store.objects
    base = codec.loads(AttemptRecord, remote.store.objects[LAYOUT.base(A)])
    assert (base.base, base.ran) == (BASE, False)
    assert remote.duties.remote.base_recorded


async def test_a_late_claim_carries_the_name_of_its_own_round(remote: Remote) -> None:
    await remote.passes()
    claim = codec.loads(Claim, remote.store.objects[LAYOUT.claim(A)])
    assert (claim.round, claim.owner) == ("r", "local/uid")
    assert remote.events.kinds().count("claimed_late") == 1


async def test_a_claim_whose_answer_was_lost_is_known_again(remote: Remote) -> None:
    remote.claim(base=False)
    await remote.passes()
    assert remote.duties.remote.base_recorded
    assert "claimed_late" not in remote.events.kinds()


@pytest.mark.parametrize("other", [{"round_name": "another"}, {"owner": "local/other"}])
async def test_under_a_number_that_another_world_claimed_nothing_goes_to_the_store(
    remote: Remote, other: dict[str, str]
) -> None:
    remote.claim(base=False, **other)
    remote.uploaded(step(10))
    with pytest.raises(ClaimTaken, match=f"attempt {A} was claimed .* by another world"):
        await remote.passes()
    assert LAYOUT.base(A) not in remote.store.objects
    assert not remote.committed(step(10))


async def test_a_base_of_another_world_under_our_number_is_not_ours(remote: Remote) -> None:
    remote.claim(base=False, round_name="another")
    theirs = replace(RECORD, base=None, chain=(), ran=False)
    remote.store.objects[LAYOUT.base(A)] = codec.dumps(theirs)
    remote.uploaded(step(10))
    with pytest.raises(ClaimTaken):
        await remote.passes()
    assert not remote.duties.remote.base_recorded
    assert not remote.committed(step(10))


async def test_old_unfinished_uploads_are_thrown_away_once_an_attempt_and_daily(
    remote: Remote,
) -> None:
    remote.claim()
    await remote.passes(3)
    assert remote.sweeps == 1
    assert ("uploads_aborted", {"count": 3}) in remote.events.all
    remote.clock.now += DAY
    await remote.passes(2)
    assert remote.sweeps == 2


async def test_a_sweep_that_fails_is_told_and_holds_up_nothing(remote: Remote) -> None:
    remote.claim()
    remote.sweep_error = Unreachable("the store is slow")
    await remote.passes()
    assert ("sweep_failed", {"message": "the store is slow"}) in remote.events.all
    remote.uploaded(step(10))
    await remote.passes()
    assert remote.committed(step(10))


async def test_what_people_deleted_is_not_made_durable_on_its_way(remote: Remote) -> None:
    remote.claim()
    await remote.passes()
    remote.uploaded(step(10))
    remote.duties.ask(f"delete {step(10)}")
    await remote.passes(2)
    assert not remote.committed(step(10))
    assert not remote.has(step(10))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"step": 77}, id="another step"),
        pytest.param({"rank": 0}, id="another rank"),
        pytest.param({"run": "default/other"}, id="another run"),
        pytest.param({"size": 99}, id="another size than the object"),
        pytest.param({"plan": "other plan"}, id="another plan"),
        pytest.param({"world_size": 3}, id="another world"),
        pytest.param({"digests": None, "fingerprint": ""}, id="not sealed"),
    ],
)
async def test_only_what_sealed_manifests_in_the_bucket_agree_on_is_adopted(
    remote: Remote, wrong: dict[str, Any]
) -> None:
    remote.claim()
    remote.put(BASE)
    key = LAYOUT.manifest(BASE, 1)
    remote.store.objects[key] = replace(manifest(BASE, 1), **wrong).to_json()
    await remote.passes()
    assert not remote.committed(BASE)
    remote.store.objects[key] = manifest(BASE, 1).to_json()
    remote.book._manifests.clear()
    await remote.passes()
    assert remote.committed(BASE)


async def test_it_never_claims_beside_a_greater_claim(remote: Remote) -> None:
    remote.claim(8_000_001, base=False)
    remote.uploaded(step(10))
    await remote.passes(2)
    assert LAYOUT.claim(A) not in remote.store.objects
    assert not remote.committed(step(10))
    assert remote.duties.superseded == 8_000_001


async def test_nothing_is_committed_after_a_greater_claim(remote: Remote) -> None:
    remote.claim()
    await remote.passes()
    remote.uploaded(step(10))
    remote.claim(8_000_001, base=False)
    await remote.leader.pass_once()  # the listing is young: the claims are looked at before
    assert not remote.committed(step(10))


async def test_retention_deletes_commit_first_and_leaves_an_intent(remote: Remote) -> None:
    remote.claim()
    for number in (10, 20, 30):
        remote.commit(step(number))
    await remote.passes(2)
    assert not remote.has(step(10))
    assert remote.has(step(20))
    assert remote.has(step(30))
    intent = codec.loads(Intent, remote.store.objects[LAYOUT.deletion(step(10))])
    assert intent.by_attempt == A
    deletes = [call for call in remote.store.calls if call.startswith("delete p/default/run/ch")]
    assert deletes[0].endswith("commit.json")
    assert deletes[1].endswith(".json")


async def test_the_base_and_pinned_checkpoints_stay(remote: Remote) -> None:
    remote.claim()
    for checkpoint in (BASE, step(10), step(20), step(30), step(40)):
        remote.commit(checkpoint)
    remote.leader.pin(step(10), True)
    await remote.passes(4)
    assert remote.has(BASE)
    assert remote.has(step(10))
    assert not remote.has(step(20))
    remote.duties.ask(f"unpin {step(10)}")
    remote.leader.pin(step(10), False)
    await remote.passes(2)
    assert not remote.has(step(10))


async def test_a_greater_claim_stops_a_delete_before_anything_is_removed(remote: Remote) -> None:
    remote.claim()
    for number in (10, 20, 30):
        remote.commit(step(number))
    await_list = remote.store.create

    def create(key: str, data: bytes) -> bool:
        made = await_list(key, data)
        if key == LAYOUT.deletion(step(10)):
            remote.claim(8_000_001, base=False)  # somebody begins just after our intent
        return made

    remote.store.create = create  # type: ignore[method-assign]
    await remote.passes(2)
    assert remote.committed(step(10))
    assert LAYOUT.deletion(step(10)) in remote.store.objects
    assert "delete_stopped" in remote.events.kinds()


async def test_a_later_leader_finishes_what_an_earlier_one_began_to_delete(remote: Remote) -> None:
    remote.claim()
    for number in (20, 30):
        remote.commit(step(number))
    remote.put(step(10), ranks=(1,))  # the earlier one died among the shards
    intent = Intent(checkpoint=step(10), by_attempt=7_000_001, created=1.0)
    remote.store.objects[LAYOUT.deletion(step(10))] = codec.dumps(intent)
    await remote.passes(2)
    assert not remote.has(step(10))


async def test_what_is_under_an_intent_is_not_committed_again(remote: Remote) -> None:
    remote.claim()
    remote.put(step(10))
    intent = Intent(checkpoint=step(10), by_attempt=7_000_001, created=1.0)
    remote.store.objects[LAYOUT.deletion(step(10))] = codec.dumps(intent)
    await remote.passes()
    assert not remote.committed(step(10))


async def test_an_intent_stays_for_a_day(remote: Remote) -> None:
    remote.claim()
    for number in (10, 20, 30):
        remote.commit(step(number))
    await remote.passes(2)
    remote.clock.now += DAY / 2
    await remote.passes()
    assert LAYOUT.deletion(step(10)) in remote.store.objects
    remote.clock.now += DAY
    await remote.passes()
    assert LAYOUT.deletion(step(10)) not in remote.store.objects


async def test_an_upload_under_way_is_not_taken_for_rubbish(remote: Remote) -> None:
    remote.claim()
    for number in (20, 30):
        remote.commit(step(number))
    remote.put(step(10), ranks=(0,))
    await remote.passes()
    assert remote.has(step(10))
    remote.clock.now += 1000
    await remote.passes(2)
    assert not remote.has(step(10))


async def test_people_can_delete_what_no_rule_protects(remote: Remote) -> None:
    remote.claim()
    for number in (20, 30):
        remote.commit(step(number))
    remote.duties.ask(f"delete {step(20)}")
    remote.duties.ask(f"delete {step(30)}")  # the last durable one
    await remote.passes(3)
    assert not remote.has(step(20))
    assert remote.has(step(30))


async def test_a_second_living_owner_of_the_run_is_refused_by_name(remote: Remote) -> None:
    remote.claim()
    await remote.passes()
    other = RemoteBook(remote.store, LAYOUT, "default/run", "local/other", remote.clock)
    try:
        with pytest.raises(RunOwnedElsewhere, match=r"default/run is in use by job local_uid"):
            other.own()
        remote.clock.now += 40
        other.own()  # the first one has gone silent
        assert not [key for key in remote.store.objects if key.endswith("local_uid")]
    finally:
        other.close()


async def test_one_sign_of_life_is_left_of_many(remote: Remote) -> None:
    remote.claim()
    await remote.passes(5)
    assert len([key for key in remote.store.objects if "/owners/" in key]) == 1


def test_a_view_counts_only_shards_that_are_whole(remote: Remote) -> None:
    remote.claim()
    remote.put(step(10))
    remote.put(step(20))
    remote.store.objects[LAYOUT.shard(step(20), 1)] = b"short"
    del remote.store.objects[LAYOUT.manifest(step(10), 0)]
    view = remote.book.view()
    assert {(c.checkpoint.step, c.rank) for c in view.inventory.copies} == {(10, 1), (20, 0)}
    assert view.claims == (A,)
    assert [base.base for base in view.bases] == [BASE]
    assert view.inventory.chains == {A: RECORD.chain}


def test_a_commit_record_speaks_for_its_manifests(remote: Remote) -> None:
    remote.put(step(10))
    shards = [{"rank": r, "size": 100, "fingerprint": f"f{r}"} for r in range(2)]
    record = CommitRecord(
        checkpoint=step(10),
        world_size=2,
        plan="plan",
        chunk_size=64,
        chain=RECORD.chain,
        shards=(),
        created=1.0,
    )
    tree = {**codec.to_plain(record), "shards": shards}
    remote.store.objects[LAYOUT.commit(step(10))] = codec.dumps(tree)
    view = remote.book.view()
    assert [c.fingerprint for c in view.inventory.copies] == ["f0", "f1"]
    assert not [call for call in remote.store.calls if call.endswith("00000.json")]


def test_keys_that_mean_nothing_are_passed_over(remote: Remote) -> None:
    for key in ("attempts/x.json", "attempts/1.txt", "checkpoints/nonsense/1.json", "deletions/y"):
        remote.store.objects[f"{LAYOUT.root}{key}"] = b"{}"
    remote.store.objects[LAYOUT.base(3)] = b"not json"
    remote.store.objects[LAYOUT.manifest(step(1), 0)] = b"not json"
    remote.store.objects[LAYOUT.shard(step(1), 0)] = b"x"
    view = remote.book.view()
    assert (view.claims, view.bases, view.inventory.copies) == ((), (), ())
