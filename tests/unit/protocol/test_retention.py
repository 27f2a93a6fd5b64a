from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.history import Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.retention import ThinView, keep, remote_victims, safe, thin
from backstay_protocol.topology import Retention
from support.protocol_values import point

LINEAGE = Lineage(2, ((1, 30),))
LAST = Retention(keep_last=1)
TWO = Retention(keep_last=2)


def own(*steps: int) -> frozenset[CheckpointId]:
    return frozenset(point(step, 2) for step in steps)


def old(*steps: int) -> frozenset[CheckpointId]:
    return frozenset(point(step, 1) for step in steps)


# --- keep -----------------------------------------------------------------------------------------


def test_the_newest_on_the_lineage_and_the_base_are_kept() -> None:
    assert keep(own(40, 50, 60) | old(20, 30), LINEAGE, TWO) == own(50, 60) | old(30)


def test_what_is_off_the_lineage_takes_no_place() -> None:
    assert keep(own(40) | old(35, 20), LINEAGE, TWO) == own(40) | old(20, 30)


def test_every_so_many_steps_one_is_kept() -> None:
    every = Retention(keep_last=1, keep_every=20)
    assert keep(own(40, 50, 60, 70), LINEAGE, every) == own(40, 60, 70) | old(30)


def test_pinned_and_the_last_durable_are_kept() -> None:
    kept = keep(own(40, 50, 60), LINEAGE, LAST, pinned=old(35), durable=own(40) | old(10) | old(99))
    assert kept == own(60, 40) | old(30, 35)


def test_a_start_from_nothing_has_no_base_to_keep() -> None:
    assert keep(own(1), Lineage(2), LAST) == own(1)
    assert keep([], Lineage(2), LAST) == frozenset()


# --- thin -----------------------------------------------------------------------------------------


def view(**fields: Any) -> ThinView:
    defaults: dict[str, Any] = {
        "lineage": LINEAGE,
        "present": own(40, 50, 60),
        "complete_local": own(40, 50, 60),
        "complete_neighbor": own(40, 50, 60),
        "has_neighbor": True,
        "has_remote": True,
        "retention": LAST,
    }
    return ThinView(**(defaults | fields))


def test_what_is_older_than_a_checkpoint_in_local_and_neighbor_goes() -> None:
    assert thin(view()) == tuple(sorted(own(40, 50)))


@pytest.mark.parametrize(
    ("fields", "victims"),
    [
        pytest.param({"complete_neighbor": own(40)}, (), id="newer ones in local only"),
        pytest.param({"complete_neighbor": own(40, 50)}, own(40), id="one newer in both"),
        pytest.param({"complete_local": own(40)}, (), id="newer ones at neighbors only"),
        pytest.param({"durable": own(60), "complete_neighbor": own()}, (), id="durable only"),
    ],
)
def test_nothing_goes_before_a_newer_one_is_in_both(fields: dict[str, Any], victims: Any) -> None:
    assert thin(view(**fields)) == tuple(sorted(victims))


def test_with_a_full_disk_a_newer_durable_one_makes_room() -> None:
    full = view(durable=own(60), complete_neighbor=own(), disk_full=True)
    assert thin(full) == tuple(sorted(own(40, 50)))


def test_without_neighbors_what_is_durable_counts() -> None:
    alone = view(has_neighbor=False, complete_neighbor=frozenset(), durable=own(50))
    assert thin(alone) == tuple(sorted(own(40)))
    assert thin(view(has_neighbor=False)) == ()


def test_without_neighbors_and_remote_the_local_tier_counts() -> None:
    assert safe(view(has_neighbor=False, has_remote=False)) == own(40, 50, 60)


def test_the_base_the_pinned_and_what_is_under_way_stay() -> None:
    present = own(40, 50, 60) | old(20, 30)
    victims = thin(view(present=present, pinned=own(40), in_transit=old(20)))
    assert victims == tuple(own(50))


def test_what_lies_off_the_lineage_goes_once_history_has_passed_it() -> None:
    dead = point(45, 1)
    assert dead in thin(view(present=own(60) | {dead}))
    assert thin(view(present=own(60) | {point(61, 1)})) == ()


def test_a_checkpoint_off_the_lineage_makes_no_room() -> None:
    dead = frozenset({point(99, 1)})
    assert thin(view(present=own(40) | dead, complete_local=dead, complete_neighbor=dead)) == ()


SOME = st.frozensets(
    st.builds(point, st.integers(1, 6).map(lambda n: 10 * n), st.integers(1, 3)), max_size=8
)


@given(SOME, SOME, SOME, SOME, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_thinning_always_leaves_something_newer_that_is_as_safe(
    present: frozenset[CheckpointId],
    local: frozenset[CheckpointId],
    neighbor: frozenset[CheckpointId],
    durable: frozenset[CheckpointId],
    has_neighbor: bool,
    has_remote: bool,
    disk_full: bool,
    keep_last: int,
) -> None:
    seen = view(
        present=present | local | neighbor,
        complete_local=local,
        complete_neighbor=neighbor,
        durable=durable,
        has_neighbor=has_neighbor,
        has_remote=has_remote,
        disk_full=disk_full,
        retention=Retention(keep_last=keep_last),
    )
    victims = thin(seen)
    survivors = [c for c in safe(seen) - set(victims) if LINEAGE.contains(c)]
    for victim in victims:
        assert any(victim.step < survivor.step for survivor in survivors)
        assert victim != LINEAGE.base
    newest_local = sorted((c for c in local if LINEAGE.contains(c)), reverse=True)[:keep_last]
    assert not set(newest_local) & set(victims)


# --- the remote tier ------------------------------------------------------------------------------


def victims(present: frozenset[CheckpointId], **fields: Any) -> tuple[CheckpointId, ...]:
    defaults: dict[str, Any] = {"lineage": LINEAGE, "retention": LAST, "durable": own(40, 50, 60)}
    return remote_victims(present, **(defaults | fields))


def test_older_durable_ones_and_remains_leave_the_remote_tier() -> None:
    present = own(40, 50, 60) | old(20, 30, 35)
    assert victims(present) == tuple(sorted(own(40, 50) | old(20, 35)))


def test_nothing_leaves_before_something_on_the_lineage_is_durable() -> None:
    assert victims(own(40, 50), durable=frozenset()) == ()
    assert victims(own(40, 50), durable=old(99)) == ()


def test_what_is_under_an_intent_is_no_longer_counted_as_durable_and_is_finished() -> None:
    assert victims(own(40, 50, 60), intents=own(60)) == tuple(own(40))
    assert victims(own(40, 50, 60), intents=own(50), retention=TWO) == tuple(own(50))


def test_the_base_the_pinned_and_what_is_under_way_stay_in_the_remote_tier() -> None:
    present = own(40, 50, 60) | old(30)
    assert victims(present, pinned=own(40), in_transit=own(50)) == ()


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_what_a_slot_holds_is_told_as_thin_exactly_if_it_would_be_thinned_once_it_came(
    keep_last: int,
) -> None:
    retention = Retention(keep_last=keep_last)
    there = own(40, 60)
    for step in (30, 50, 55):
        coming = own(step)
        waits = thin(
            view(
                present=there,
                complete_local=there,
                complete_neighbor=there,
                in_memory=coming,
                retention=retention,
            )
        )
        came = there | coming
        after = thin(
            view(present=came, complete_local=came, complete_neighbor=there, retention=retention)
        )
        assert (coming <= set(waits)) == (coming <= set(after)), step


def test_a_slot_that_is_newer_than_all_that_is_safe_is_never_thin() -> None:
    assert thin(view(in_memory=own(60, 70))) == tuple(sorted(own(40, 50)))
