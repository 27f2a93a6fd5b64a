"""What a tier still has to take, and in which order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.history import Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import FORCED, SCHEDULE
from backstay_protocol.names import LOCAL, MEMORY, REMOTE
from backstay_protocol.topology import Schedule
from backstay_sidecar.replication.wanted import LeaderWord, Shard, to_strike, wanted

ATTEMPT = 2
ALWAYS = Schedule()


def at(step: int, attempt: int = ATTEMPT) -> CheckpointId:
    return CheckpointId(step, attempt)


def shard(step: int, reason: str = SCHEDULE, *, rank: int = 0, attempt: int = ATTEMPT) -> Shard:
    return Shard(
        checkpoint=at(step, attempt),
        rank=rank,
        reason=reason,
        size=1,
        in_memory=True,
        in_local=False,
    )


WORD = LeaderWord(attempt=ATTEMPT, lineage=Lineage(ATTEMPT, ((1, 50),)), base=at(50, 1))


def steps(tier: str, schedule: Schedule, shards: list[Shard], word: LeaderWord) -> list[int]:
    return [s.checkpoint.step for s in wanted(tier, lambda step: schedule, shards, (), word)]


def test_a_tier_takes_what_its_own_schedule_names() -> None:
    shards = [shard(step) for step in (60, 65, 70)]
    assert steps(REMOTE, Schedule(every_steps=10), shards, WORD) == [70, 60]
    assert steps(LOCAL, ALWAYS, shards, WORD) == [70, 65, 60]


def test_what_was_forced_goes_everywhere() -> None:
    assert steps(REMOTE, Schedule(every_steps=10), [shard(63, FORCED)], WORD) == [63]
    assert steps(REMOTE, Schedule(every_seconds=9), [shard(63, FORCED)], WORD) == [63]


def test_a_schedule_in_seconds_is_the_leaders_to_carry_out() -> None:
    shards = [shard(60), shard(61)]
    assert steps(REMOTE, Schedule(every_seconds=30), shards, WORD) == []
    chosen = replace(WORD, persist={REMOTE: (at(60),)})
    assert steps(REMOTE, Schedule(every_seconds=30), shards, chosen) == [60]


def test_what_is_complete_in_memory_goes_first_and_of_that_the_newest() -> None:
    shards = [shard(step) for step in (60, 70, 80)]
    word = replace(WORD, complete={MEMORY: (at(70), at(60))})
    assert steps(REMOTE, ALWAYS, shards, word) == [70, 60, 80]


def test_an_older_one_is_superfluous_only_once_a_newer_one_is_whole_in_the_tier() -> None:
    shards = [shard(60), shard(70), shard(65, FORCED)]
    assert steps(REMOTE, ALWAYS, shards, WORD) == [70, 65, 60]
    word = replace(WORD, complete={REMOTE: (at(70),)})
    assert steps(REMOTE, ALWAYS, shards, word) == [65]


def test_the_base_is_wanted_again_even_when_it_is_not_due() -> None:
    base = shard(50, attempt=1)
    word = replace(WORD, complete={LOCAL: (at(60),)})
    assert steps(LOCAL, Schedule(every_steps=1000), [base], word) == [50]


def test_what_is_off_the_lineage_is_not_moved() -> None:
    assert steps(REMOTE, ALWAYS, [shard(51, FORCED, attempt=1)], WORD) == []


def test_what_is_thinned_out_is_not_brought_back() -> None:
    word = replace(WORD, thin=frozenset({at(60)}))
    assert steps(LOCAL, ALWAYS, [shard(60), shard(70)], word) == [70]


def test_what_is_there_is_not_moved_again() -> None:
    shards = [shard(60), shard(60, rank=1)]
    assert wanted(LOCAL, lambda step: ALWAYS, shards, {(at(60), 0)}, WORD) == [shards[1]]


@given(
    st.lists(st.builds(shard, st.integers(51, 60), st.sampled_from([SCHEDULE, FORCED]))),
    st.lists(st.integers(51, 60), max_size=4),
)
def test_the_newest_checkpoint_that_is_here_is_never_dropped(
    shards: list[Shard], complete: list[int]
) -> None:
    word = replace(WORD, complete={REMOTE: tuple(at(step) for step in complete)})
    newest = max((s.checkpoint for s in shards), default=None)
    if newest is None or any(newest <= done for done in word.complete[REMOTE]):
        return
    assert newest in {s.checkpoint for s in wanted(REMOTE, lambda step: ALWAYS, shards, (), word)}


def test_what_is_thinned_near_may_still_be_on_its_way_to_the_store_if_it_was_forced() -> None:
    word = replace(WORD, thin=frozenset({at(60), at(61)}))
    shards = [shard(60, FORCED), shard(61)]
    assert steps(LOCAL, ALWAYS, shards, word) == []
    assert steps(REMOTE, ALWAYS, shards, word) == [60]


def test_what_people_deleted_goes_nowhere() -> None:
    word = replace(WORD, unwanted=frozenset({at(60)}), persist={REMOTE: (at(60),)})
    for tier in (LOCAL, REMOTE):
        assert steps(tier, ALWAYS, [shard(60, FORCED)], word) == []


def test_slots_of_deleted_checkpoints_are_struck_but_never_the_newest_complete_one() -> None:
    word = replace(
        WORD,
        complete={MEMORY: (at(70), at(60))},
        unwanted=frozenset({at(60), at(70), at(50, 1), at(75)}),
    )
    here = [at(60), at(70), at(75), at(80), at(50, 1)]
    assert to_strike(here, word) == {at(60), at(75)}
