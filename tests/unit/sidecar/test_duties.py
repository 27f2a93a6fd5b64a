"""What the leader tells every sidecar between two restores. Orders to ranks: test_orders.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay_protocol.control import State
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    ProgressReply,
    ProgressRequest,
    TierState,
)
from backstay_protocol.names import REMOTE
from backstay_protocol.records import CommitRecord
from backstay_protocol.rounds import begin
from backstay_protocol.topology import (
    LocalTier,
    MemoryTier,
    RemoteTier,
    Retention,
    Schedule,
    Topology,
)
from backstay_sidecar.restore.duties import Duties, RemoteKnown
from backstay_sidecar.restore.views import checkpoint_list, phase
from support.duties_job import BASE, RECORD, A, Job, alone
from support.restore_fakes import copy, remote_tier, topology


def with_remote(
    schedule: Schedule | None = None,
    memory: Schedule | None = None,
    **more: Any,
) -> Topology:
    tier = remote_tier()
    if schedule is not None:
        tier = RemoteTier(endpoint=tier.endpoint, bucket=tier.bucket, schedule=schedule)
    return topology(
        2,
        remote=tier,
        memory=MemoryTier(schedule=memory or Schedule(every_steps=10)),
        **more,
    )


def commit_of(checkpoint: CheckpointId) -> CommitRecord:
    return CommitRecord(
        checkpoint=checkpoint,
        world_size=2,
        plan="plan",
        chunk_size=64,
        chain=(),
        shards=(),
        created=1.0,
    )


def test_a_step_counts_once_every_rank_has_published_it() -> None:
    job = Job()
    job.publish(20, replicas=(0,))
    assert job.word().complete_step == 0
    job.publish(20, replicas=(1,))
    word = job.word()
    assert word.complete_step == 20
    assert word.complete["memory"] == (CheckpointId(20, A),)


def test_shards_that_turn_out_to_be_of_two_plans_are_not_complete_in_memory() -> None:
    job = Job()
    checkpoint = job.publish(20)
    job.copies[0].append(copy(20, A, 0, "memory", 0, plan="one"))
    job.copies[1].append(copy(20, A, 1, "memory", 1, plan="local"))
    word = job.word()
    assert checkpoint not in word.complete["memory"]
    assert word.complete_step == 0


def test_each_tier_is_complete_by_itself_and_only_history_counts() -> None:
    job = Job()
    local = job.put(20, "local")
    job.put(20, "neighbor", replicas=(0,))
    job.copies[0].append(copy(9, 7_000_001, 0, "local", 0))  # after the base: off the lineage
    job.copies[1].append(copy(9, 7_000_001, 1, "local", 1))
    word = job.word()
    assert word.complete["local"] == (local,)
    assert word.complete["neighbor"] == ()


def test_the_version_grows_only_when_something_else_is_said() -> None:
    job = Job()
    first = job.word()
    assert job.word().version == first.version
    job.publish(20)
    assert job.word().version == first.version + 1


def test_before_an_attempt_has_begun_the_word_counts_nowhere() -> None:
    duties = Duties(topology(2), 5)
    word = duties.speak(duties.look(1.0))
    assert word.attempt == 0


def test_the_word_of_a_replaced_pod_is_not_heard() -> None:
    job = Job()
    job.word()
    request = ProgressRequest(replica=1, generation=6, attempt=A)
    assert not job.duties.take(request, job.now)


def test_a_leader_whose_sidecars_are_in_a_newer_attempt_says_nothing_more() -> None:
    job = Job()
    job.word()
    job.duties.take(ProgressRequest(replica=1, generation=8, attempt=8_000_001), job.now)
    word = job.duties.speak(job.duties.look(job.now))
    assert word.attempt == 0
    assert "8000001" in word.message


def test_a_shard_leaves_only_when_a_newer_checkpoint_is_in_local_and_neighbor() -> None:
    job = Job(topology(2, local=LocalTier(root="/x", retention=Retention(keep_last=1))))
    older, newer = job.put(20, "local"), job.put(30, "local")
    job.put(20, "neighbor")
    assert job.word().thin == ()
    job.put(30, "neighbor")
    word = job.word()
    assert word.thin == (older,)
    assert newer not in word.thin


def test_nothing_is_thinned_while_a_sidecar_is_not_heard() -> None:
    job = Job(topology(2, local=LocalTier(root="/x", retention=Retention(keep_last=1))))
    for step in (20, 30):
        job.put(step, "local")
        job.put(step, "neighbor")
    assert job.word().thin
    job.now += 60
    job.hear(0)
    assert job.duties.speak(job.duties.look(job.now)).thin == ()


def test_what_waits_for_the_remote_tier_is_not_thinned() -> None:
    job = Job(with_remote(local=LocalTier(root="/x", retention=Retention(keep_last=1))))
    waiting = job.put(20, "local")
    job.put(30, "local")
    for step in (20, 30):
        job.put(step, "neighbor")
    assert waiting not in job.word().thin
    job.duties.remote = RemoteKnown(commits={CheckpointId(30, A): commit_of(CheckpointId(30, A))})
    assert waiting in job.word().thin


def test_a_pinned_checkpoint_is_kept_and_an_unpinned_one_goes() -> None:
    job = Job(topology(2, local=LocalTier(root="/x", retention=Retention(keep_last=1))))
    pinned = job.put(20, "local")
    job.put(30, "local")
    for step in (20, 30):
        job.put(step, "neighbor")
    job.duties.ask(f"pin {pinned}")
    word = job.word()
    assert (pinned in word.thin, word.pinned) == (False, (pinned,))
    job.duties.ask(f"unpin {pinned}")
    assert pinned in job.word().thin


def test_a_tier_by_seconds_takes_the_newest_complete_one_each_interval() -> None:
    job = Job(with_remote(Schedule(every_seconds=100)))
    assert "remote" not in job.word().persist
    job.publish(20)
    first = job.publish(30)
    assert job.word().persist["remote"] == (first,)
    job.publish(40)
    assert job.word(seconds=50.0).persist["remote"] == (first,)
    job.duties.remote = RemoteKnown(commits={first: commit_of(first)})
    assert "remote" not in job.word(seconds=10.0).persist
    assert job.word(seconds=60.0).persist["remote"] == (CheckpointId(40, A),)


def test_people_can_send_one_checkpoint_to_every_tier() -> None:
    job = Job(with_remote(Schedule(every_steps=1000)))
    wanted = job.put(20, "local")
    job.duties.ask(f"persist {wanted}")
    persist = job.word().persist
    assert persist == {"neighbor": (wanted,), "remote": (wanted,)}


def test_what_is_under_an_intent_is_not_durable_any_more() -> None:
    job = Job(with_remote())
    gone = CheckpointId(20, A)
    job.duties.remote = RemoteKnown(commits={gone: commit_of(gone)}, intents=frozenset({gone}))
    assert job.word().durable == ()


def test_the_base_the_last_durable_and_the_pinned_are_protected_from_people() -> None:
    job = Job(with_remote())
    durable, pinned = CheckpointId(20, A), CheckpointId(30, A)
    job.duties.remote = RemoteKnown(commits={durable: commit_of(durable)})
    job.duties.ask(f"pin {pinned}")
    assert job.duties.protected() == {BASE, durable, pinned}


def test_neighbours_are_another_node() -> None:
    assert Job().word().neighbors == {0: 1, 1: 0}


def test_a_flush_is_one_forced_save_that_is_done_when_the_outermost_tier_has_it() -> None:
    job = Job(with_remote())
    job.word(seconds=1.0, steps=5)
    assert not job.duties.flush().durable
    step = -job.word().orders.save_at_step
    assert job.duties.flush().step == step
    job.step = step
    job.publish(step)
    job.word(seconds=1.0)
    assert not job.duties.flush().durable
    job.duties.remote = RemoteKnown(
        commits={CheckpointId(step, A): commit_of(CheckpointId(step, A))}
    )
    job.word(seconds=1.0)
    reply = job.duties.flush()
    assert (reply.step, reply.durable) == (step, True)


def test_a_flush_when_nobody_trains_asks_only_for_what_is_there() -> None:
    job = Job(with_remote())
    job.rank = {"state": State.FINISHED}
    last = job.publish(20)
    job.word()
    assert (job.duties.flush().step, job.duties.flush().durable) == (20, False)
    assert job.word().persist == {REMOTE: (last,)}, "whatever the tier's schedule says"
    job.duties.remote = RemoteKnown(commits={last: commit_of(last)})
    assert not job.word().persist
    assert job.duties.flush().durable


@pytest.mark.parametrize("words", ["dance", "pin", "pin x", "save now"])
def test_words_that_mean_nothing_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"request|checkpoint"):
        Job().duties.ask(words)


def test_a_new_leader_says_the_same_once_the_sidecars_have_told_it_again() -> None:
    job = Job()
    job.publish(20)
    for tier in ("local", "neighbor"):
        job.put(20, tier)
    before = job.word()
    job.duties = Duties(job.topology, 10_000)
    job.duties.begin(RECORD, job.now)
    after = job.word()
    assert replace(after, version=before.version) == before
    assert after.version > before.version
    assert isinstance(after, ProgressReply)


def test_what_would_be_thinned_at_once_is_not_brought_from_a_slot_again() -> None:
    job = Job(topology(2, local=LocalTier(root="/x", retention=Retention(keep_last=1))))
    forced = job.publish(20)
    job.publish(30)
    for tier in ("local", "neighbor"):
        job.put(30, tier)
    assert forced in job.word().thin, "it lies in no tier any more, and its slot is still there"


def test_a_forced_save_that_retention_would_keep_may_still_come_late() -> None:
    job = Job(topology(2, local=LocalTier(root="/x", retention=Retention(keep_last=2))))
    late = job.publish(20)
    for step in (10, 30):
        for tier in ("local", "neighbor"):
            job.put(step, tier)
    job.put(20, "local", replicas=(0,))
    assert late not in job.word().thin


def test_a_choice_by_time_that_was_stored_and_thinned_is_not_chosen_again() -> None:
    tier = LocalTier(
        root="/x", schedule=Schedule(every_seconds=100), retention=Retention(keep_last=1)
    )
    job = Job(topology(2, local=tier))
    chosen = job.publish(20)
    assert job.word().persist["local"] == (chosen,)
    for where in ("local", "neighbor"):
        job.put(20, where)
    assert "local" not in job.word().persist
    job.copies = {0: [], 1: []}  # a forced one came, and the older one was thinned out
    for where in ("local", "neighbor"):
        job.put(30, where)
    assert "local" not in job.word().persist


def test_only_a_disk_that_says_it_is_full_lets_a_durable_one_make_room() -> None:
    job = Job(with_remote(local=LocalTier(root="/x", retention=Retention(keep_last=1))))
    older = job.put(20, "local")
    job.put(40, "local")
    durable = CheckpointId(30, A)
    job.duties.remote = RemoteKnown(commits={durable: commit_of(durable)})
    job.tiers = (TierState(tier="local", ok=False, message="the disk can't be read"),)
    assert job.word().thin == ()
    job.tiers = (TierState(tier="local", message="no room", full=True),)
    assert older in job.word().thin
    job.tiers = (TierState(tier="neighbor", message="no room there", full=True),)
    assert older in job.word().thin


def test_what_people_delete_leaves_every_tier_and_is_not_brought_back() -> None:
    job = Job()
    gone = job.publish(20)
    for tier in ("local", "neighbor"):
        job.put(20, tier)
        job.put(30, tier)
    job.duties.ask(f"delete {gone}")
    assert job.word().unwanted == (gone,)
    job.copies, job.published = {0: [], 1: []}, {0: [], 1: []}
    assert job.word().unwanted == (gone,), "a disk that comes back may have it yet"


def test_a_new_leader_hears_of_deletes_from_the_sidecars() -> None:
    job = Job()
    gone = job.publish(20)
    job.duties = Duties(job.topology, 10_000)
    job.duties.begin(RECORD, job.now)
    job.hear(1, unwanted=(gone,))
    assert job.word().unwanted == (gone,)


@pytest.mark.parametrize("verb", ["pin", "persist"])
def test_what_people_want_again_is_not_deleted_whatever_sidecars_remember(verb: str) -> None:
    job = Job()
    wanted = job.publish(20)
    job.duties.ask(f"delete {wanted}")
    job.duties.ask(f"{verb} {wanted}")
    job.hear(1, unwanted=(wanted,))
    assert job.word().unwanted == ()


def test_the_only_complete_checkpoint_is_not_deleted() -> None:
    job = Job()
    only = job.put(20, "local")
    job.word()
    assert job.duties.protected() >= {only}
    job.put(30, "local")
    job.word()
    assert only not in job.duties.protected()


def test_a_committed_checkpoint_is_shown_in_the_remote_tier_until_it_is_to_be_deleted() -> None:
    job = Job(with_remote())
    durable = CheckpointId(10, A)
    job.duties.remote = RemoteKnown(commits={durable: commit_of(durable)})
    job.word()
    (shown,) = checkpoint_list(job.topology, job.duties).checkpoints
    assert (shown.complete_in, shown.present_in, shown.durable) == (
        ("remote",),
        {"remote": 2},
        True,
    )
    job.duties.remote = replace(job.duties.remote, intents=frozenset({durable}))
    (shown,) = checkpoint_list(job.topology, job.duties).checkpoints
    assert (shown.complete_in, shown.present_in) == ((), {})
    assert not shown.durable


def test_people_are_told_of_a_silent_sidecar_until_it_is_heard_again() -> None:
    job = Job()
    assert job.word(seconds=1.0).message == ""
    assert alone(job, 3.0).message == ""
    assert "no word from the sidecar of replica 1" in alone(job, 1.0).message
    assert job.word(seconds=1.0).message == ""


def test_a_leader_that_was_restarted_does_not_call_a_flush_done_before_all_were_heard() -> None:
    """Whoever asks deletes pods by the answer."""
    job = Job(with_remote())
    assert not job.duties.flush().durable
    job.hear(0)
    job.duties.speak(job.duties.look(job.now))
    assert not job.duties.flush().durable


def test_the_newest_copy_in_sight_counts_whole_or_not_if_it_is_on_the_lineage() -> None:
    job = Job(with_remote())
    job.copies[0] = [
        copy(30, A, 0, "local", 0),
        copy(30, A, 1, "neighbor", 0),
        copy(90, BASE.attempt, 0, "local", 0),
    ]
    job.word()
    assert job.duties.newest_copy == CheckpointId(30, A)


def test_a_leader_that_was_restarted_names_no_neighbours_before_it_knows_all_nodes() -> None:
    """By addresses alone the ring would be another one, with both copies on one node."""
    job = Job(topology(4))
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    for replica in (0, 1):
        job.hear(replica, node=nodes[replica])
    assert job.duties.speak(job.duties.look(job.now)).neighbors == {}
    for replica in (2, 3):
        job.hear(replica, node=nodes[replica])
    ring = job.duties.speak(job.duties.look(job.now)).neighbors
    assert all(nodes[a] != nodes[b] for a, b in ring.items())


def test_a_replica_that_is_never_heard_does_not_keep_the_others_without_neighbours() -> None:
    job = Job(topology(4))
    job.now += 60
    for replica in (0, 1, 2):
        job.hear(replica, node=f"n{replica}")
    assert len(job.duties.speak(job.duties.look(job.now)).neighbors) == 4


def test_a_world_whose_ranks_start_again_does_not_train() -> None:
    job = Job()
    idle = begin("r", job.now)

    def told() -> tuple[str, str]:
        return phase(job.duties, idle, False, job.topology)

    job.hear(0)
    assert told()[0] == "Training", "rank 1 has its go-ahead and was not heard yet"
    job.word(seconds=1.0, steps=1)
    assert told()[0] == "Training"
    job.rank = {"attempt": 0, "state": State.RESTORING, "step": 0}
    job.hear(1)
    assert told() == ("Joining", "1 of 2 ranks start again; none has called restore() yet")


def test_how_long_nobody_made_a_step_is_told_by_the_leaders_own_clock() -> None:
    job = Job()
    job.word(seconds=1.0, steps=1)
    job.rank = {"step_time": job.now}
    job.word(seconds=1.0, steps=0)
    job.word(seconds=30.0)
    assert job.duties.quiet_seconds(job.now) == 31.0
