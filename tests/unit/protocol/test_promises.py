from __future__ import annotations

from dataclasses import replace

import pytest

from backstay_protocol.messages import PromiseRequest, StoreRequest
from backstay_protocol.promises import current_attempt, heeds, in_line, merge, promise, store
from backstay_protocol.records import AttemptRecord, AttemptState
from backstay_protocol.topology import PodIdentity
from support.protocol_values import point, record

POD = PodIdentity(replica=1, generation=5, current={0: 4, 1: 5}, replaces=3)
MEMBERS = {0: 4, 1: 5}


def ask(attempt: int, round_: str = "r", members: dict[int, int] | None = None) -> PromiseRequest:
    return PromiseRequest(round=round_, attempt=attempt, members=members or MEMBERS)


def promised(attempt: int, round_: str = "r", stored: AttemptRecord | None = None) -> AttemptState:
    return AttemptState(promised=attempt, round=round_, record=stored)


# --- promise --------------------------------------------------------------------------------------


def test_a_number_above_everything_known_is_promised() -> None:
    state, granted, _ = promise(AttemptState(), ask(7), POD)
    assert granted
    assert (state.promised, state.round, state.record) == (7, "r", None)


@pytest.mark.parametrize(
    ("state", "request_"),
    [
        pytest.param(promised(7), ask(6), id="smaller than promised"),
        pytest.param(promised(7), ask(7, "other"), id="equal, of another round"),
        pytest.param(AttemptState(record=record(7)), ask(7), id="equal to a stored one"),
        pytest.param(promised(5, stored=record(8)), ask(7), id="smaller than a stored one"),
    ],
)
def test_what_is_not_greater_is_refused(state: AttemptState, request_: PromiseRequest) -> None:
    after, granted, why = promise(state, request_, POD)
    assert not granted
    assert after == state
    assert "comes too late" in why


def test_the_same_question_again_gets_the_same_answer() -> None:
    state, granted, _ = promise(promised(7), ask(7), POD)
    assert granted
    assert state.promised == 7


def test_a_promise_keeps_the_record() -> None:
    state, _, _ = promise(promised(5, stored=record(5)), ask(7), POD)
    assert state.record == record(5)


def test_a_pod_that_is_not_named_refuses() -> None:
    _, granted, why = promise(AttemptState(), ask(7, members={0: 4, 1: 3}), POD)
    assert not granted
    assert "generation 3 of replica 1; this pod is generation 5" in why


def test_the_newest_pod_refuses_a_world_that_contains_a_replaced_one() -> None:
    _, granted, why = promise(AttemptState(), ask(7, members={0: 2, 1: 5}), POD)
    assert not granted
    assert "replaced pod of replica 0" in why


def test_an_older_pod_can_not_know_who_came_later() -> None:
    _, granted, _ = promise(AttemptState(), ask(7, members={0: 9, 1: 5}), POD)
    assert granted


def test_a_bare_topology_has_no_generations_to_compare() -> None:
    bare = PodIdentity(replica=1)
    _, granted, _ = promise(AttemptState(), ask(7, members={0: 0, 1: 0}), bare)
    assert granted


# --- the mark "in line" ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        pytest.param(5, True, id="this pod stored a record"),
        pytest.param(3, True, id="the pod it directly replaced did"),
        pytest.param(2, False, id="an older pod did"),
        pytest.param(0, False, id="nobody did"),
    ],
)
def test_in_line_is_who_was_in_every_world_since_the_disks_newest_record(
    mark: int, expected: bool
) -> None:
    assert in_line(AttemptState(in_line=mark), POD) is expected


def test_a_pod_that_replaces_nobody_is_not_in_line_by_an_empty_mark() -> None:
    assert not in_line(AttemptState(), PodIdentity(replica=0))
    assert not in_line(AttemptState(in_line=4), PodIdentity(replica=0, generation=5))


def test_a_promise_hands_the_mark_on_to_the_successor() -> None:
    state, _, _ = promise(AttemptState(in_line=3), ask(7), POD)
    assert state.in_line == 5


def test_a_promise_removes_the_mark_of_a_pod_further_back() -> None:
    state, _, _ = promise(AttemptState(in_line=2), ask(7), POD)
    assert state.in_line == 0


def test_without_a_disk_a_pod_is_never_in_line() -> None:
    state, _, _ = promise(AttemptState(in_line=5), ask(7), POD, has_disk=False)
    assert state.in_line == 0
    state, stored, _ = store(
        state, StoreRequest(round="r", record=record(7, ran=False)), POD, has_disk=False
    )
    assert stored
    assert state.in_line == 0


# --- store ----------------------------------------------------------------------------------------


def test_a_base_is_stored_under_its_promise_and_puts_the_pod_in_line() -> None:
    base = record(7, point(3), ran=False)
    state, stored, why = store(promised(7), StoreRequest(round="r", record=base), POD)
    assert stored
    assert (state.record, state.in_line) == (base, 5)
    assert "base of attempt 7" in why


def test_the_go_ahead_follows_the_base() -> None:
    state = promised(7, stored=record(7, ran=False))
    state, stored, why = store(state, StoreRequest(round="r", record=record(7)), POD)
    assert stored
    assert state.record == record(7, ran=True)
    assert "go-ahead of attempt 7" in why


def test_repeated_stores_change_nothing() -> None:
    done = promised(7, stored=record(7, ran=True))
    for ran in (False, True):
        state, stored, _ = store(done, StoreRequest(round="r", record=record(7, ran=ran)), POD)
        assert stored
        assert state.record == record(7, ran=True)


@pytest.mark.parametrize(
    ("state", "request_", "why"),
    [
        pytest.param(
            promised(8),
            StoreRequest(round="r", record=record(7, ran=False)),
            "not what was promised",
            id="a greater promise was given",
        ),
        pytest.param(
            promised(7, "other"),
            StoreRequest(round="r", record=record(7, ran=False)),
            "not what was promised",
            id="promised to another round",
        ),
        pytest.param(
            AttemptState(),
            StoreRequest(round="r", record=record(7, ran=False)),
            "round none",
            id="never promised",
        ),
        pytest.param(
            promised(7),
            StoreRequest(round="r", record=record(7)),
            "before its base",
            id="go-ahead without a base",
        ),
        pytest.param(
            promised(7, stored=record(7, point(1), ran=False)),
            StoreRequest(round="r", record=record(7, point(2))),
            "with another base",
            id="go-ahead for another base",
        ),
        pytest.param(
            promised(7, stored=record(8)),
            StoreRequest(round="r", record=record(7, ran=False)),
            "attempt 8 is stored here",
            id="a newer record",
        ),
    ],
)
def test_what_was_not_promised_is_not_stored(
    state: AttemptState, request_: StoreRequest, why: str
) -> None:
    after, stored, said = store(state, request_, POD)
    assert not stored
    assert after == state
    assert why in said


# --- whose words count ----------------------------------------------------------------------------


def test_words_count_under_the_attempt_that_was_promised_and_stored() -> None:
    state = promised(7, stored=record(7))
    assert current_attempt(state) == 7
    assert heeds(state, 7)
    assert not heeds(state, 6)
    assert not heeds(state, 8)


def test_from_a_newer_promise_on_no_older_word_counts() -> None:
    state = promised(8, stored=record(7))
    assert current_attempt(state) == 0
    assert not heeds(state, 7)
    assert not heeds(state, 0)


def test_before_the_first_record_no_word_counts() -> None:
    assert current_attempt(AttemptState()) == 0
    assert not heeds(AttemptState(), 0)


# --- two volumes ----------------------------------------------------------------------------------


def test_of_two_volumes_the_greater_promise_and_the_newer_record_count() -> None:
    disk = AttemptState(promised=8, round="b", record=record(5), in_line=5)
    memory = AttemptState(promised=7, round="a", record=record(7), in_line=4)
    assert merge(disk, memory) == AttemptState(promised=8, round="b", record=record(7), in_line=5)
    assert merge(replace(disk, promised=6), memory).round == "a"


def test_the_mark_is_the_disks() -> None:
    memory = AttemptState(promised=7, round="a", record=record(7), in_line=4)
    assert merge(None, memory).in_line == 0
    assert merge(None, memory).record == record(7)
    assert merge(AttemptState(in_line=5), None).in_line == 5


def test_a_first_start_finds_nothing() -> None:
    assert merge(None, None) == AttemptState()
