"""What follows the end of a container, as a kubelet would have it."""

from __future__ import annotations

import pytest

from backstay_operator.decide import ContainerState, Ended, Restart, StaysEnded, after_end
from backstay_operator.decide.containers import ended, started
from backstay_operator.settings import RestartSettings

SETTINGS = RestartSettings(
    first_backoff_seconds=10, most_backoff_seconds=300, calm_seconds=600, early_deaths=3
)


def end_again(state: ContainerState, now: float, code: int = 1) -> ContainerState:
    return ended(started(state, now), Ended(exit_code=code, at=now + 1), SETTINGS)


def test_the_first_restart_is_at_once_and_later_ones_wait_twice_as_long_each() -> None:
    state, waits = ContainerState(name="trainer", running=False), []
    for turn in range(8):
        state = end_again(state, 1000.0 * turn)
        decided = after_end(state, always=False, settings=SETTINGS)
        assert isinstance(decided, Restart)
        assert state.ended is not None
        waits.append(decided.at - state.ended.at)
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]
    assert state.restarts == 7


def test_a_thousand_quick_ends_still_wait_no_longer_than_the_most() -> None:
    state = ContainerState(name="t", running=False, quick_ends=5000, ended=Ended(exit_code=1, at=0))
    decided = after_end(state, always=False, settings=SETTINGS)
    assert isinstance(decided, Restart)
    assert decided.at == 300


def test_a_container_that_ran_long_enough_restarts_at_once_again() -> None:
    state = ContainerState(name="trainer", running=False)
    for turn in range(4):
        state = end_again(state, 100.0 * turn)
    state = ended(started(state, 1000.0), Ended(exit_code=1, at=1600.0), SETTINGS)
    decided = after_end(state, always=False, settings=SETTINGS)
    assert decided == Restart(at=1600.0, why="restarts at once")


def test_success_ends_a_trainer_for_good_but_never_a_sidecar() -> None:
    state = end_again(ContainerState(name="x", running=False), 0.0, code=0)
    assert state.completed
    assert not state.failed
    assert after_end(state, always=False, settings=SETTINGS) == StaysEnded(why="completed")
    assert isinstance(after_end(state, always=True, settings=SETTINGS), Restart)


def test_a_wait_is_told_in_seconds() -> None:
    state = end_again(end_again(ContainerState(name="x", running=False), 0.0), 5.0)
    decided = after_end(state, always=False, settings=SETTINGS)
    assert decided.why == "restarts in 10 s"


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_backoff_seconds": 400},
        {"first_backoff_seconds": -1},
        {"early_deaths": 0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RestartSettings(**wrong)  # type: ignore[arg-type]
