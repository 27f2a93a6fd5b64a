"""Each rule of the attempt protocol, with the trace that it prevents, run by the real code.

Every trace is played twice: with all rules (nothing may be violated) and without the rule in
question (the violation must appear, so the trace can fail). Which line of production code guards a
rule is said by the function of its name in support/protocol_rules.py. W1 to W10 are the weaknesses
that the project's review of its first design found.
"""

from __future__ import annotations

import pytest

from backstay_protocol.commit import Deleting
from backstay_protocol.history import lineage_of
from backstay_protocol.ids import CheckpointId, generation_of
from backstay_protocol.messages import PromiseRequest
from backstay_protocol.promises import promise
from backstay_protocol.records import AttemptState
from backstay_protocol.round_events import LISTING_FAILED, STOOD_DOWN
from backstay_protocol.rounds import AskStore, Phase
from backstay_protocol.topology import PodIdentity
from support.protocol_cluster import Pod
from support.protocol_judge import Judge, Violation
from support.protocol_rules import without
from support.protocol_sim import Sim


def cluster(replicas: int = 1, **options: object) -> Sim:
    sim = Sim(replicas, **options)  # type: ignore[arg-type]
    Judge(sim)
    return sim


def durable_steps(sim: Sim, *steps: int) -> None:
    """Start from nothing, save so many steps; the named ones become durable, all are on disk."""
    sim.start()
    for step in range(1, max(steps) + 1):
        sim.train(1, "copy")
        if step in steps:
            sim.settle("upload", "commit", only=lambda a, s=step: upload_of(a[1], s))


def upload_of(text: str, step: int) -> bool:
    return f".{step}." in text or f" {step:012d}-" in text


def base_step(sim: Sim, replica: int = 0) -> int:
    """The step that the current pod of a replica went ahead from."""
    pod = newest(sim, replica)
    assert pod.run >= 0, f"{pod.name} has not gone ahead"
    record = sim.state(pod).record
    assert record is not None
    return record.base.step if record.base else 0


def begun(pod: Pod) -> bool:
    return pod.run >= 0


def newest(sim: Sim, replica: int = 0) -> Pod:
    return next(p for p in sim.current_pods() if p.replica == replica)


def go_on(sim: Sim, name: str, *pods: Pod, limit: int = 400) -> None:
    """Deliver what belongs to this round and these pods."""
    own = {name, *(pod.name for pod in pods)}
    kinds = ("deliver", "load", "go", "hear")
    sim.settle(*kinds, limit=limit, only=lambda a: bool(own & set(a[1].split())))


# --- W1: numbers repeat ---------------------------------------------------------------------------


def a_replaced_pod_restarts_in_place_while_the_remote_tier_is_away() -> Sim:
    sim = cluster()
    durable_steps(sim, 1)
    old = newest(sim)
    new = sim.replace_pod(old, "cut off", None)
    sim.restore(new)
    assert begun(new)
    sim.flip_remote()
    sim.restore(old)  # it has stored a record as this pod, so it is in line and needs no claim
    return sim


def test_generations_keep_two_worlds_from_training_under_one_number() -> None:
    sim = a_replaced_pod_restarts_in_place_while_the_remote_tier_is_away()
    assert generation_of(sim.worlds[-1].attempt) < generation_of(sim.worlds[-2].attempt)


def test_without_generations_a_replaced_pod_takes_the_number_of_the_new_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "fence")
    with pytest.raises(Violation, match="I2"):
        a_replaced_pod_restarts_in_place_while_the_remote_tier_is_away()


def one_number_is_asked_for_by_two_rounds() -> tuple[bool, bool]:
    """Whether a member grants it to the first, and to the second."""
    pod = PodIdentity(replica=1, generation=1)
    state, granted = AttemptState(), []
    for name in ("one", "two"):
        request = PromiseRequest(round=name, attempt=1_000_002, members={0: 1, 1: 1})
        state, answer, _ = promise(state, request, pod)
        granted.append(answer)
    return granted[0], granted[1]


def test_a_number_promised_to_one_round_is_refused_to_another() -> None:
    assert one_number_is_asked_for_by_two_rounds() == (True, False)


def test_without_owners_a_member_serves_two_rounds_of_one_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "owner")
    assert one_number_is_asked_for_by_two_rounds() == (True, True)


# --- W2: an old leader deletes the base of the new attempt ----------------------------------------


def an_old_world_commits_and_deletes_while_a_new_one_looks(*, look_first: bool) -> Sim:
    """The new world begins; the old one completes step 2 and clears step 1 away."""
    sim = cluster(2)
    sim.lists_before_claim = look_first
    durable_steps(sim, 1)
    sim.train(1, "copy")
    old, old_other = sim.current_pods()
    sim.act("upload", f"{old.name} is about to upload 0.2.0")
    sim.act("upload", f"{old.name} uploads")
    sim.act("upload", f"{old_other.name} is about to upload 0.2.1")
    new = sim.replace_pod(old, "cut off", None)
    other = sim.replace_pod(old_other, "cut off", None)
    sim.gather(new, other)
    sim.act("deliver", "AskPromise")
    sim.act("deliver", "AskPromise")
    sim.act("upload", f"{old_other.name} uploads")
    sim.act("commit", "about to commit")
    sim.act("commit", "commits")
    for _ in range(4):
        sim.act("delete", old.name)
    assert old.leader.deletion is not None
    assert old.leader.deletion.todo is Deleting.REMOVE_COMMIT
    go_on(sim, "r2", new, other)
    sim.act("delete", old.name)
    return sim


def test_who_claims_before_it_looks_sees_what_the_old_leader_left() -> None:
    sim = an_old_world_commits_and_deletes_while_a_new_one_looks(look_first=False)
    assert base_step(sim) == 2


def test_who_looks_before_it_claims_loses_its_base_to_the_old_leader() -> None:
    with pytest.raises(Violation, match="I4"):
        an_old_world_commits_and_deletes_while_a_new_one_looks(look_first=True)


def a_store_of_an_older_round_arrives_late() -> Sim:
    """The old leader's store reaches the shared member after the new world has begun and saved."""
    sim = cluster(2, has_remote=False)
    sim.start()
    sim.train(1, "copy")
    old, member = newest(sim, 0), newest(sim, 1)
    new = sim.replace_pod(old, "replaced alive", None)
    sim.gather(old, member)
    sim.settle("deliver", only=lambda a: "AskPromise of r2" in a[1])
    sim.settle("load")
    assert any(isinstance(message.effect, AskStore) for message in sim.in_flight)
    sim.restore(new, member)
    assert begun(new)
    sim.train(1, "copy")
    late = [m for m in sim.in_flight if isinstance(m.effect, AskStore) and m.effect.replica == 1]
    sim.deliver(late[0])
    last = sim.replace_pod(new, "node lost", None)
    sim.restore(last, member)
    return sim


def test_a_promise_binds_a_member_against_late_stores_of_an_older_round() -> None:
    sim = a_store_of_an_older_round_arrives_late()
    assert base_step(sim) == 2


def test_without_promises_and_chains_in_manifests_history_goes_back_to_the_older_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "promise", "manifest")
    sim = a_store_of_an_older_round_arrives_late()
    assert base_step(sim) == 1  # though step 2 of the newer world is whole and in sight


def test_chains_in_manifests_alone_keep_history_when_a_record_was_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "promise")
    sim = a_store_of_an_older_round_arrives_late()
    assert base_step(sim) == 2


# --- W3, W4: fallback to an older checkpoint against an old leader's deletion ---------------------


def a_stopped_leader_wakes_up_after_the_new_attempt_fell_back() -> Sim:
    sim = cluster()
    durable_steps(sim, 1, 2)
    old = newest(sim)
    sim.act("delete", "wants to delete 000000000001-")
    sim.act("delete", "list claims")  # and here it is stopped
    new = sim.replace_pod(old, "cut off", None)
    corrupt(sim, 2)
    sim.restore(new)
    assert base_step(sim) == 1
    sim.settle("delete", limit=4, only=lambda a: old.name in a[1])
    return sim


def corrupt(sim: Sim, step: int) -> None:
    sim.remote.corrupt |= {key for key in sim.remote.shards if key[0].step == step}


def test_a_woken_leader_looks_again_after_its_intent_and_leaves_the_new_base_alone() -> None:
    sim = a_stopped_leader_wakes_up_after_the_new_attempt_fell_back()
    assert {c.step for c in sim.remote.commits} == {1, 2}
    assert {c.step for c in sim.remote.intents} == {1}


def test_without_intents_a_woken_leader_deletes_the_base_of_the_new_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "intent")
    with pytest.raises(Violation, match="I4"):
        a_stopped_leader_wakes_up_after_the_new_attempt_fell_back()


def the_only_good_checkpoint_is_under_an_intent_that_came_to_nothing() -> Sim:
    sim = cluster()
    durable_steps(sim, 1, 2)
    old = newest(sim)
    sim.act("delete", "wants to delete 000000000001-")
    sim.act("delete", "list claims")
    sim.act("delete", "write the intent")
    new = sim.replace_pod(old, "node lost", None)
    corrupt(sim, 2)
    sim.restore(new)
    return sim


def test_an_intent_orders_the_candidates_and_never_forbids_the_last_one() -> None:
    sim = the_only_good_checkpoint_is_under_an_intent_that_came_to_nothing()
    assert base_step(sim) == 1


def test_without_a_last_resort_an_intent_refuses_the_only_checkpoint_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "lastresort")
    with pytest.raises(Violation, match="I5"):
        the_only_good_checkpoint_is_under_an_intent_that_came_to_nothing()


# --- W5: the remote tier is away for a moment at a start ------------------------------------------


def the_claim_fails_and_the_listing_after_it_works() -> Sim:
    sim = cluster()
    durable_steps(sim, 1, 2)
    old = newest(sim)
    new = sim.replace_pod(old, "cut off", None)
    corrupt(sim, 2)
    sim.gather(new)
    sim.act("deliver", "AskPromise")
    sim.act("lose", "MakeClaim")
    go_on(sim, "r2", new)
    sim.settle("delete", limit=6, only=lambda a: old.name in a[1])
    return sim


def test_an_attempt_without_a_claim_takes_nothing_from_the_remote_tier() -> None:
    sim = the_claim_fails_and_the_listing_after_it_works()
    assert not begun(newest(sim))
    assert sim.pods[-1].leader.round.phase is Phase.CLAIM  # type: ignore[union-attr]
    sim.tick(newest(sim))
    go_on(sim, "r2", newest(sim))
    assert not begun(newest(sim))  # step 1 is deleted by now, step 2 is bad: it says so


def test_an_unclaimed_attempt_that_reads_remote_copies_loses_its_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "claimed")
    with pytest.raises(Violation, match="I4"):
        the_claim_fails_and_the_listing_after_it_works()


# --- W6: a silent fresh start ---------------------------------------------------------------------


def all_disks_are_new_and_the_remote_tier_is_away() -> Sim:
    sim = cluster()
    durable_steps(sim, 1)
    new = sim.replace_pod(newest(sim), "node lost", None)
    sim.flip_remote()
    sim.restore(new)
    return sim


def test_a_start_from_nothing_waits_for_the_listing_of_the_remote_tier() -> None:
    sim = all_disks_are_new_and_the_remote_tier_is_away()
    assert not begun(newest(sim))
    sim.flip_remote()
    sim.tick(newest(sim))
    sim.settle("deliver", "load", "go")
    assert base_step(sim) == 1


def test_without_the_listing_a_world_starts_from_nothing_beside_a_full_bucket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "freshlist", "known b")
    with pytest.raises(Violation, match="I5"):
        all_disks_are_new_and_the_remote_tier_is_away()


# --- W7: tiers thinned apart ----------------------------------------------------------------------


def step_two_is_complete_in_local_only() -> Sim:
    """Step 1 is in local and neighbor, step 2 in local only; then whatever may be thinned goes."""
    sim = cluster(2, has_remote=False)
    sim.start()
    sim.train(1, "copy")
    sim.train(1)
    sim.settle("copy", only=lambda a: "writes" in a[1])
    sim.settle("thin")
    return sim


def test_nothing_leaves_local_before_the_newer_one_has_reached_the_neighbors() -> None:
    sim = step_two_is_complete_in_local_only()
    assert len({key[1] for key in sim.disks[0].shards}) == 2
    sim.settle("copy")
    sim.settle("thin")
    assert {key[1].step for disk in sim.disks for key in disk.shards} == {2}


def test_tiers_thinned_apart_do_not_survive_a_node_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "further")
    with pytest.raises(Violation, match="I4"):
        step_two_is_complete_in_local_only()


# --- W8: the count of dead attempts ---------------------------------------------------------------


def a_base_from_which_attempts_die(deaths: int, *, last_step: int = 2) -> Sim:
    """Attempts start from step `last_step` and die; each time the leader's memory is lost too."""
    sim = cluster(quarantine_after=2, has_remote=False)
    sim.start()
    sim.train(last_step, "copy")
    for _ in range(1 + deaths):
        sim.restore(newest(sim))
        sim.kill_sidecar(newest(sim))
    return sim


def test_a_base_from_which_two_attempts_died_is_passed_over_for_an_older_one() -> None:
    assert base_step(a_base_from_which_attempts_die(1)) == 2
    assert base_step(a_base_from_which_attempts_die(2)) == 1


def test_a_count_kept_in_the_leaders_memory_would_be_lost_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "tries")
    assert base_step(a_base_from_which_attempts_die(2)) == 2


def test_a_quarantined_base_is_taken_when_nothing_else_is_left() -> None:
    assert base_step(a_base_from_which_attempts_die(3, last_step=1)) == 1


def test_without_a_last_resort_a_quarantined_base_is_refused_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "lastresort")
    with pytest.raises(Violation, match="I5"):
        a_base_from_which_attempts_die(3, last_step=1)


def leaders_crash_in_the_barrier(crashes: int) -> Sim:
    """The base is stored, the leader crashes before the go-ahead: no rank ever ran."""
    sim = cluster(quarantine_after=2, has_remote=False)
    sim.start()
    sim.train(2, "copy")
    for _ in range(crashes):
        pod = newest(sim)
        sim.gather(pod)
        sim.settle("deliver", only=lambda a: "AskPromise" in a[1])
        sim.tick(pod)
        sim.act("load")
        sim.act("deliver", "AskStore")
        sim.kill_sidecar(pod)
        sim.in_flight.clear()
    sim.restore(newest(sim))
    return sim


def test_attempts_that_never_got_their_go_ahead_do_not_quarantine_a_good_base() -> None:
    assert base_step(leaders_crash_in_the_barrier(3)) == 2


def test_counting_attempts_that_never_ran_quarantines_a_good_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "onlyran")
    assert base_step(leaders_crash_in_the_barrier(3)) == 1


# --- W9: a replaced leader goes on after a greater claim ------------------------------------------


def a_replaced_leader_lists_after_a_greater_claim() -> Sim:
    sim = cluster()
    durable_steps(sim, 1)
    sim.train(1, "copy")  # step 2 lies on the first disk only
    first = newest(sim)
    second = sim.replace_pod(first, "cut off", None)
    sim.gather(second)
    sim.act("deliver", "AskPromise")
    sim.act("deliver", "MakeClaim")  # and here the second one is stopped
    sim.kill_pod(first)
    third = sim.replace_pod(second, "cut off", first.disk)
    sim.gather(third)
    sim.settle("deliver", limit=2, only=lambda a: "r3" in a[1])
    go_on(sim, "r3", third, limit=4)
    assert not begun(third)  # its base is recorded and stored, no rank has gone ahead
    go_on(sim, "r2", second)
    sim.settle("upload", only=lambda a: third.name in a[1])
    if begun(second):
        sim.restore(second)
    return sim


def test_a_greater_claim_in_the_listing_ends_the_round_of_a_replaced_world() -> None:
    sim = a_replaced_leader_lists_after_a_greater_claim()
    ended = sim.pods[1].leader.last
    assert ended is not None
    assert ended.give_up is not None
    assert ended.give_up.code == STOOD_DOWN


def test_a_replaced_world_that_goes_on_trains_from_a_history_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "standdown")
    with pytest.raises(Violation, match="I3"):
        a_replaced_leader_lists_after_a_greater_claim()


# --- W10: a disk that knows less, the remote tier away at a start ---------------------------------


def a_pod_on_a_returned_disk(*, away_before_claim: bool) -> Sim:
    """2-A lies on the first disk only; B began from 1-A meanwhile; then the first disk is back."""
    sim = cluster()
    durable_steps(sim, 1)
    sim.train(1, "copy")
    first = newest(sim)
    second = sim.replace_pod(first, "cut off", None)
    sim.kill_pod(first)
    sim.restore(second)
    assert base_step(sim) == 1
    third = sim.replace_pod(second, "cut off", first.disk)
    sim.gather(third)
    sim.act("deliver", "AskPromise")
    if not away_before_claim:
        sim.act("deliver", "MakeClaim")
    sim.flip_remote()
    go_on(sim, "r3", third, limit=3)
    sim.kill_sidecar(third)
    sim.in_flight.clear()
    sim.flip_remote()
    sim.restore(third)
    return sim


def test_a_round_that_claimed_and_can_not_list_ends() -> None:
    sim = a_pod_on_a_returned_disk(away_before_claim=False)
    assert base_step(sim) == 1


def test_a_world_with_nobody_in_line_waits_for_its_claim() -> None:
    sim = a_pod_on_a_returned_disk(away_before_claim=True)
    assert base_step(sim) == 1


@pytest.mark.parametrize(("rule", "away_before_claim"), [("known a", False), ("known b", True)])
def test_without_the_rule_known_a_returned_disk_undoes_an_attempt_that_ran(
    monkeypatch: pytest.MonkeyPatch, rule: str, away_before_claim: bool
) -> None:
    without(monkeypatch, rule)
    with pytest.raises(Violation, match="I3"):
        a_pod_on_a_returned_disk(away_before_claim=away_before_claim)


def test_the_reason_why_a_claimed_round_ended_is_said() -> None:
    sim = cluster()
    sim.gather(newest(sim))
    sim.act("deliver", "AskPromise")
    sim.act("deliver", "MakeClaim")
    sim.act("lose", "ListRemote")
    ended = newest(sim).leader.last
    assert ended is not None
    assert ended.give_up is not None
    assert ended.give_up.code == LISTING_FAILED
    assert ended.give_up.retry


def test_a_pod_in_line_begins_while_the_remote_tier_is_away() -> None:
    sim = cluster()
    durable_steps(sim, 1)
    sim.train(1, "copy")
    sim.flip_remote()
    sim.restore(newest(sim))  # the same pod, restarted
    assert base_step(sim) == 2
    sim.restore(sim.replace_pod(newest(sim), "dies", newest(sim).disk))  # its direct successor
    assert base_step(sim) == 2


def a_replaced_pod_joins_a_new_one_while_the_remote_tier_is_away() -> Sim:
    """The whole of 2-A is at the replaced pod of replica 1; B ran without it, from 1-A."""
    sim = cluster(2)
    durable_steps(sim, 1)
    sim.train(1)
    sim.settle("copy", only=lambda a: "writes" in a[1] or a[1].startswith("1.1 pulls"))
    first, old = sim.current_pods()
    other = sim.replace_pod(old, "replaced alive", None)
    first.slots.clear()
    sim.restore(first, other)
    assert base_step(sim) == 1
    new = sim.replace_pod(first, "node lost", None)
    sim.flip_remote()
    sim.gather(new, old)
    go_on(sim, "r3", new, old, limit=6)
    sim.kill_sidecar(new)
    sim.in_flight.clear()
    sim.flip_remote()
    sim.gather(new, old)
    sim.settle("deliver", only=lambda a: "r4" in a[1])
    return sim


def test_a_world_is_exactly_the_pods_that_were_current_when_its_newest_was_created() -> None:
    sim = a_replaced_pod_joins_a_new_one_while_the_remote_tier_is_away()
    current = newest(sim).leader.round
    assert current is not None
    assert current.phase is Phase.GATHER
    assert "newer pod of replica 1" in current.message


def test_a_world_with_a_replaced_pod_undoes_an_attempt_that_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "current")
    with pytest.raises(Violation, match="I3"):
        a_replaced_pod_joins_a_new_one_while_the_remote_tier_is_away()


# --- second locks: nothing was found with each of them off alone ----------------------------------


def an_attempt_without_a_claim_wants_to_upload() -> bool:
    sim = cluster()
    durable_steps(sim, 1)
    sim.flip_remote()
    sim.restore(newest(sim))
    sim.train(1, "copy")
    sim.flip_remote()
    return any("upload" in action[1] for action in sim.actions() if action[0] == "upload")


def test_no_byte_reaches_the_remote_tier_before_the_claim_and_the_base() -> None:
    assert not an_attempt_without_a_claim_wants_to_upload()


def test_without_claimfirst_an_attempt_uploads_what_nobody_has_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without(monkeypatch, "claimfirst")
    assert an_attempt_without_a_claim_wants_to_upload()


def test_a_late_claim_and_base_open_the_way_for_uploads() -> None:
    sim = cluster()
    durable_steps(sim, 1)
    sim.flip_remote()
    sim.restore(newest(sim))
    sim.train(1, "copy")
    sim.flip_remote()
    sim.settle("claim", "upload", "commit")
    assert {checkpoint.step for checkpoint in sim.remote.commits} == {1, 2}


def test_the_go_ahead_is_given_only_when_every_member_has_stored_the_base() -> None:
    sim = cluster(2, has_remote=False)
    sim.gather(*sim.current_pods())
    sim.settle("deliver", only=lambda a: "AskPromise" in a[1])
    sim.settle("load")
    first = [m for m in sim.in_flight if isinstance(m.effect, AskStore)]
    assert len(first) == 2
    sim.deliver(first[0])
    assert all(not m.effect.request.record.ran for m in sim.in_flight)  # type: ignore[union-attr]
    sim.deliver(first[1])
    assert all(m.effect.request.record.ran for m in sim.in_flight)  # type: ignore[union-attr]
    sim.deliver(sim.in_flight[0])
    assert not any(action[0] == "go" for action in sim.actions())
    sim.deliver(sim.in_flight[0])
    assert any(action[0] == "go" for action in sim.actions())


def test_a_word_of_an_older_attempt_thins_nothing_once_a_newer_number_is_promised() -> None:
    sim = cluster(has_remote=False)
    sim.start()
    sim.train(2, "copy")
    sim.act("thin", "hears")
    pod = newest(sim)
    sim.gather(pod)
    sim.act("deliver", "AskPromise")
    sim.act("thin", "thins")
    assert {key[1].step for key in sim.disks[0].shards} == {1, 2}


def test_a_checkpoint_of_another_name_is_not_the_one_on_the_lineage() -> None:
    """A late writer may add files; it can't add history."""
    sim = cluster(has_remote=False)
    sim.start()
    sim.train(1, "copy")
    late = sim.worlds[0].attempt
    sim.restore(newest(sim))
    record = sim.state(newest(sim)).record
    assert record is not None
    assert lineage_of(record).contains(CheckpointId(1, late))
    assert not lineage_of(record).contains(CheckpointId(2, late))
