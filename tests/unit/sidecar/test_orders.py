"""What ranks are told through the leader: when to save, how often, to plan anew, to leave."""

from __future__ import annotations

import pytest

from backstay_protocol.messages import (
    Policy,
    TierState,
)
from backstay_protocol.topology import (
    MemoryTier,
    Schedule,
)
from support.duties_job import A, Job, alone
from support.restore_fakes import topology


def test_a_forced_save_is_announced_ahead_of_every_rank_and_ends_when_all_have_passed() -> None:
    job = Job()
    job.word()
    job.word(seconds=2.0, steps=20)  # ten steps a second
    job.duties.ask("save")
    order = job.word().orders.save_at_step
    assert order < -(job.step + 10)
    job.duties.ask("save")  # asked again, it is the same save
    assert job.word(seconds=1.0, steps=10).orders.save_at_step == order
    job.step = -order
    assert job.word(seconds=1.0).orders.save_at_step == 0
    assert job.word(seconds=5.0, steps=5).orders.save_at_step == 0


def test_memory_by_seconds_is_one_common_step_each_interval() -> None:
    job = Job(topology(2, memory=MemoryTier(schedule=Schedule(every_seconds=30))))
    assert job.word(seconds=1.0, steps=1).orders.save_at_step == 0
    order = job.word(seconds=30.0, steps=30).orders.save_at_step
    assert order > job.step
    job.step = order
    assert job.word(seconds=1.0).orders.save_at_step == 0
    assert job.word(seconds=20.0, steps=20).orders.save_at_step == 0
    assert job.word(seconds=15.0, steps=15).orders.save_at_step > order


def test_no_step_is_announced_while_a_rank_is_missing() -> None:
    job = Job()
    job.duties.ask("save")
    job.hear(0)
    word = job.duties.speak(job.duties.look(job.now))
    assert word.orders.save_at_step == 0
    assert job.word().orders.save_at_step < 0


def test_a_rank_whose_structure_changed_makes_all_plan_anew_at_one_save() -> None:
    job = Job()
    job.rank = {"replan_wanted": True}
    word = job.word(seconds=1.0, steps=5)
    assert word.orders.replan_at_step == word.orders.save_at_step > job.step
    job.rank = {}
    job.step = word.orders.replan_at_step
    word = job.word(seconds=1.0)
    assert (word.orders.replan_at_step, word.orders.save_at_step) == (0, 0)


def test_a_growing_backlog_widens_the_interval_for_all_and_none_narrows_it_again() -> None:
    job = Job()
    assert job.word(steps=10).orders.every_steps == 10
    job.tiers = (TierState(tier="local", backlog=4),)
    wide = job.word(seconds=30.0, steps=30)
    assert wide.orders.every_steps == 20
    assert wide.orders.every_from > job.step
    job.tiers = (TierState(tier="local", backlog=0),)
    job.step = wide.orders.every_from + 20
    assert job.word(seconds=30.0).orders.every_steps == 10


def test_a_tier_that_is_away_widens_nothing() -> None:
    job = Job()
    job.tiers = (TierState(tier="local", ok=False, message="disk full", backlog=50),)
    assert job.word(seconds=30.0, steps=30).orders.every_steps == 10


def test_a_policy_is_in_force_from_a_step_that_all_ranks_can_hear_of() -> None:
    job = Job()
    job.word(seconds=1.0, steps=5)
    look = job.duties.look(job.now)
    policy = job.duties.set_policy(Policy(every_steps=7), look)
    orders = job.word().orders
    assert (orders.every_steps, orders.every_from) == (7, policy.effective_from)
    assert policy.effective_from > job.step


def test_no_policy_is_promised_while_a_rank_does_not_train() -> None:
    job = Job()
    with pytest.raises(ValueError, match="not every rank trains"):
        job.duties.set_policy(Policy(every_steps=7), job.duties.look(job.now))


def test_a_leader_that_takes_over_goes_on_with_the_interval_in_force() -> None:
    job = Job()
    job.hear(0)
    assert job.duties.speak(job.duties.look(job.now)).orders.every_steps == 0
    job.rank = {"every_steps": 40, "every_from": 8}
    orders = job.word().orders
    assert (orders.every_steps, orders.every_from) == (40, 8)


def test_a_leader_that_takes_over_ends_a_difference_that_the_old_one_left() -> None:
    job = Job()
    job.hear(0)
    job.rank = {"every_steps": 40, "every_from": 90}
    job.hear(0)
    job.rank = {"every_steps": 20, "every_from": 0}
    job.hear(1)
    orders = job.duties.speak(job.duties.look(job.now)).orders
    assert orders.every_steps == 40
    assert orders.every_from > job.step


def test_the_replica_that_hangs_furthest_behind_is_told_to_leave() -> None:
    job = Job(topology(2, hang_seconds=60))
    assert job.word(seconds=1.0, steps=1).orders.leave_attempt == 0
    stuck = job.now
    job.rank = {"step_time": stuck}
    job.now += 61
    job.hear(0)
    job.step -= 1
    job.hear(1)
    orders = job.duties.speak(job.duties.look(job.now)).orders
    assert (orders.leave_attempt, orders.leave_replica) == (A, 1)


def test_ranks_that_train_on_while_others_wait_in_restore_are_told_to_leave() -> None:
    job = Job()
    assert job.word(waiting=(1,)).orders.leave_attempt == 0
    orders = job.word(seconds=30.0, waiting=(1,)).orders
    assert (orders.leave_attempt, orders.leave_replica) == (A, -1)


def test_a_policy_without_an_interval_is_refused_with_what_to_write() -> None:
    job = Job()
    job.word(seconds=1.0, steps=5)
    with pytest.raises(ValueError, match=r"every_steps is 0; .* 1 or more"):
        job.duties.set_policy(Policy(), job.duties.look(job.now))
    assert job.word().orders.every_steps == 10


def test_all_replicas_leave_a_hang_where_no_launcher_restarts_the_world() -> None:
    job = Job(topology(2, hang_seconds=60, leave_together=True))
    job.rank = {"step_time": job.now}
    job.word(seconds=1.0)
    orders = job.word(seconds=61.0).orders
    assert (orders.leave_attempt, orders.leave_replica) == (A, -1)


def test_after_a_leave_without_effect_another_replica_is_told_and_then_all() -> None:
    job = Job(topology(2, hang_seconds=60))
    job.rank = {"step_time": job.now}
    job.word(seconds=1.0)
    first = job.word(seconds=61.0).orders.leave_replica
    assert job.word(seconds=19.0).orders.leave_replica == first
    assert job.word(seconds=2.0).orders.leave_replica == 1 - first
    assert job.word(seconds=21.0).orders.leave_replica == -1


def test_a_leave_that_is_obeyed_is_not_given_to_another_replica() -> None:
    job = Job(topology(2, hang_seconds=60))
    job.rank = {"step_time": job.now}
    job.word(seconds=1.0)
    first = job.word(seconds=61.0).orders.leave_replica
    job.rank = {"step_time": job.now - 62.0, "leaving": True}
    assert job.word(seconds=40.0).orders.leave_replica == first
    job.rank = {"step_time": job.now}
    assert job.word(seconds=21.0).orders.leave_replica == first, "they train again"


def test_who_stays_though_all_were_told_to_leave_is_named_furthest_behind_first() -> None:
    job = Job(topology(2, hang_seconds=60, leave_together=True))
    job.rank = {"step_time": job.now}
    job.word(seconds=1.0)
    job.word(seconds=61.0)
    assert job.duties.orders is not None

    def unheeded() -> tuple[tuple[int, ...], float]:
        assert job.duties.orders is not None
        return job.duties.orders.unheeded(job.duties.look(job.now))

    job.word(seconds=19.0)
    assert unheeded() == ((), 0.0), "they have their time"
    job.hear(1)
    job.now += 2.0
    job.step -= 1
    job.hear(1)
    assert unheeded() == ((1, 0), 21.0)
    job.rank |= {"leaving": True}
    job.hear(1)
    assert unheeded() == ((0,), 21.0)


@pytest.mark.parametrize("why", ["forced", "replan", "seconds"])
def test_no_step_is_announced_while_a_sidecar_is_silent(why: str) -> None:
    schedule = Schedule(every_seconds=30) if why == "seconds" else Schedule(every_steps=10)
    job = Job(topology(2, memory=MemoryTier(schedule=schedule)))
    job.word(seconds=1.0, steps=1)
    if why == "forced":
        job.now += 4.0
        job.duties.ask("save")
    job.rank = {"replan_wanted": why == "replan"}
    orders = alone(job, 40.0, steps=5).orders
    assert (orders.save_at_step, orders.replan_at_step) == (0, 0)
    assert job.word(seconds=1.0, steps=1).orders.save_at_step != 0, "all are heard again"


def test_no_schedule_is_promised_or_widened_while_a_sidecar_is_silent() -> None:
    job = Job()
    job.word(seconds=1.0, steps=20)
    job.tiers = (TierState(tier="local", backlog=4),)
    assert alone(job, 30.0, steps=30).orders.every_steps == 10
    with pytest.raises(ValueError, match="no word from the sidecar of replica 1"):
        job.duties.set_policy(Policy(every_steps=7), job.duties.look(job.now))
    assert job.word(steps=1).orders.every_steps == 20


def test_what_was_announced_before_a_sidecar_fell_silent_stays() -> None:
    job = Job()
    job.word(seconds=1.0, steps=1)
    job.duties.ask("save")
    order = job.word(seconds=1.0, steps=1).orders.save_at_step
    assert order < 0
    assert alone(job, 20.0).orders.save_at_step == order


def test_a_stepped_wall_clock_makes_nobody_leave() -> None:
    job = Job(topology(2, hang_seconds=60))
    job.word(seconds=1.0, steps=1)
    job.rank = {"step_time": job.now - 10_000.0}
    for _ in range(70):
        assert job.word(seconds=1.0, steps=1).orders.leave_attempt == 0


def test_no_replica_is_told_to_leave_by_what_was_said_before_the_limit_ran_out() -> None:
    job = Job(topology(2, hang_seconds=60))
    job.rank = {"step_time": job.now}
    job.word(seconds=1.0, steps=1)
    job.word(seconds=59.0)
    job.now += 2.0
    silent = job.duties.speak(job.duties.look(job.now))
    assert silent.orders.leave_attempt == 0, "nobody has said yet that it stands still"
    job.hear(0)
    assert job.duties.speak(job.duties.look(job.now)).orders.leave_attempt == 0
    job.hear(1)
    assert job.duties.speak(job.duties.look(job.now)).orders.leave_attempt == A


def test_no_replica_is_told_to_leave_while_a_sidecar_is_silent() -> None:
    job = Job(topology(2, hang_seconds=60))
    job.rank = {"step_time": job.now}
    job.word(seconds=1.0, steps=1)
    assert alone(job, 120.0).orders.leave_attempt == 0
    assert job.word(seconds=1.0).orders.leave_attempt == A


def test_a_leader_that_was_paused_trusts_no_word_that_may_have_waited_meanwhile() -> None:
    job = Job(topology(2, hang_seconds=60))
    job.rank = {"step_time": job.now}
    job.word(seconds=1.0, steps=1)
    job.duties.ask("save")
    job.now += 600.0
    job.duties.woke(job.now)
    orders = job.word().orders  # it lay in a socket: the ranks are far beyond
    assert (orders.leave_attempt, orders.save_at_step) == (0, 0)
    job.rank = {}
    orders = job.word(seconds=4.0, steps=6000).orders
    assert (orders.leave_attempt, orders.save_at_step < -job.step) == (0, True)
