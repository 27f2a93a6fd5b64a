from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.completeness import (
    complete,
    complete_in,
    incomplete,
    published_by_all,
    ranks_in_words,
)
from backstay_protocol.messages import CopySource, ShardCopy
from support.protocol_values import copies, copy, point

STEP = point(5)


def test_a_checkpoint_is_whole_when_every_rank_has_a_shard_somewhere() -> None:
    whole = complete([copy(STEP, 0, "memory"), copy(STEP, 1, "remote")])[STEP]
    assert (whole.world_size, whole.plan) == (2, "plan")
    assert [shard.rank for shard in whole.shards] == [0, 1]
    assert whole.shards[0].sources == (CopySource(tier="memory", holder=0),)
    assert whole.shards[1].sources == (CopySource(tier="remote", holder=-1),)


def test_all_copies_of_a_shard_are_named_nearest_tier_first() -> None:
    every = [*copies(STEP, "remote"), *copies(STEP, "memory"), copy(STEP, 0, "neighbor", 1)]
    assert complete(every)[STEP].shards[0].sources == (
        CopySource(tier="memory", holder=0),
        CopySource(tier="neighbor", holder=1),
        CopySource(tier="remote", holder=-1),
    )


def test_a_missing_rank_makes_it_incomplete_and_is_named() -> None:
    lacking = [copy(STEP, 1, world_size=3)]
    assert complete(lacking) == {}
    assert incomplete(lacking) == {STEP: "no copy of ranks 0 and 2 (of 3) is in sight"}
    assert incomplete(copies(STEP)) == {}


def test_a_tier_is_complete_by_itself_only() -> None:
    split = [copy(STEP, 0, "local"), copy(STEP, 1, "neighbor", 0)]
    assert complete_in(split, "local") == {}
    assert complete_in([*split, copy(STEP, 1, "local")], "local").keys() == {STEP}


def test_shards_of_different_plans_are_not_one_checkpoint() -> None:
    mixed = [copy(STEP, 0, plan="p"), copy(STEP, 1, plan="local")]
    assert complete(mixed) == {}
    assert incomplete(mixed) == {STEP: "its shards were saved under different plans"}
    assert complete([copy(STEP, rank, plan="local") for rank in (0, 1)]).keys() == {STEP}


def test_shards_of_worlds_of_different_sizes_are_not_one_checkpoint() -> None:
    mixed = [copy(STEP, 0, world_size=2), copy(STEP, 1, world_size=3)]
    assert complete(mixed) == {}
    assert incomplete(mixed) == {STEP: "its shards were saved by worlds of different sizes"}


def test_copies_with_different_bytes_are_never_mixed() -> None:
    mixed = [
        copy(STEP, 0, "local", fingerprint="x"),
        copy(STEP, 0, "local", 1, fingerprint="y"),
        copy(STEP, 1, "local"),
    ]
    assert complete(mixed) == {}
    assert incomplete(mixed) == {
        STEP: "copies of rank 0 differ, and no tier holds one set of all ranks"
    }


def test_where_copies_differ_the_tier_hardest_to_lose_is_believed() -> None:
    remote = [copy(STEP, rank, "remote", fingerprint=f"r{rank}") for rank in (0, 1)]
    memory = [copy(STEP, rank, "memory", fingerprint=f"m{rank}") for rank in (0, 1)]
    shared = copy(STEP, 1, "local", fingerprint="r1")
    whole = complete([*memory, *remote, shared])[STEP]
    assert [shard.fingerprint for shard in whole.shards] == ["r0", "r1"]
    assert whole.shards[0].sources == (CopySource(tier="remote", holder=-1),)
    assert whole.shards[1].sources == (
        CopySource(tier="local", holder=1),
        CopySource(tier="remote", holder=-1),
    )


def test_two_whole_worlds_under_one_name_in_one_tier_are_believed_neither() -> None:
    two = [copy(STEP, rank, plan=plan) for plan in ("p", "q") for rank in (0, 1)]
    assert complete(two) == {}


def test_a_whole_world_is_believed_beside_the_remains_of_another() -> None:
    assert complete([*copies(STEP), copy(STEP, 0, plan="q")]).keys() == {STEP}


def test_complete_in_memory_means_published_by_all() -> None:
    one, two = point(1), point(2)
    assert published_by_all({0: (one, two), 1: (two,)}, 2) == {two}
    assert published_by_all({0: (one,), 1: (two,)}, 2) == frozenset()
    assert published_by_all({0: (one,)}, 2) == frozenset()


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0 and 2"),
        ([0, 1, 2], "ranks 0, 1 and 2"),
        (range(10), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_ranks_are_named_and_long_lists_cut(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


COPY = st.builds(
    copy,
    st.builds(point, st.integers(1, 2), st.just(1)),
    st.integers(0, 2),
    st.sampled_from(("memory", "local", "neighbor", "remote")),
    st.integers(0, 2),
    world_size=st.sampled_from((2, 3)),
    plan=st.sampled_from(("p", "local")),
    fingerprint=st.sampled_from(("x", "y")),
)


@given(st.lists(COPY, max_size=12))
def test_what_is_whole_is_consistent_and_what_is_not_is_explained(found: list[ShardCopy]) -> None:
    whole, faults = complete(found), incomplete(found)
    assert whole.keys() | faults.keys() == {c.checkpoint for c in found}
    assert not whole.keys() & faults.keys()
    for checkpoint, one in whole.items():
        assert [shard.rank for shard in one.shards] == list(range(one.world_size))
        for shard in one.shards:
            assert shard.sources
            for source in shard.sources:
                assert any(
                    (c.checkpoint, c.rank, c.fingerprint)
                    == (checkpoint, shard.rank, shard.fingerprint)
                    and (c.tier, c.holder) == (source.tier, source.holder)
                    and (c.world_size, c.plan) == (one.world_size, one.plan)
                    for c in found
                )


@given(st.lists(COPY, max_size=8))
def test_the_order_of_inventories_does_not_matter(found: list[ShardCopy]) -> None:
    assert complete(found) == complete(list(reversed(found)))


def test_sizes_count_as_content() -> None:
    odd = replace(copy(STEP, 0, "memory"), size=9)
    assert complete([odd, *copies(STEP)]).keys() == {STEP}  # local is one set by itself
