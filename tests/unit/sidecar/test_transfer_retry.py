from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.errors import Cancelled, CorruptData, Unreachable
from backstay_sidecar.transfer.retry import Budget, RetryPolicy, pause, with_retries
from backstay_sidecar.transfer.s3_errors import MissingBucket, Place, StoreFailing

PLACE = Place("http://s3", "b")


class FakeClock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeEvent(threading.Event):
    """An event whose waiting makes the clock go on."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        self.clock.now += timeout
        return self.is_set()


@given(
    failures=st.integers(1, 200),
    spent=st.floats(0, 100),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_a_pause_is_bounded_and_ends_with_the_budget(
    failures: int, spent: float, chance: float
) -> None:
    policy = RetryPolicy(first_seconds=0.2, most_seconds=5, budget_seconds=60)
    seconds = pause(policy, failures, spent, chance)
    if spent >= 60:
        assert seconds is None
    else:
        assert seconds is not None
        assert 0 <= seconds <= min(5, 60 - spent)


def test_pauses_grow_by_the_factor_up_to_the_most() -> None:
    policy = RetryPolicy(first_seconds=1, factor=2, most_seconds=5, budget_seconds=100)
    assert [pause(policy, n, 0, 0.999999) for n in range(1, 6)] == pytest.approx([1, 2, 4, 5, 5])
    assert pause(policy, 1, 0, 0) == 0.5


def test_it_is_tried_until_it_works() -> None:
    clock = FakeClock()
    cancel, answers = FakeEvent(clock), iter([Unreachable("a"), Unreachable("b"), None])

    def action() -> str:
        if error := next(answers):
            raise error
        return "done"

    budget = Budget(RetryPolicy(), clock, chance=lambda: 0.5)
    assert with_retries(budget, cancel, action) == "done"
    assert cancel.pauses == pytest.approx([0.15, 0.3])


def test_the_budget_is_of_the_time_without_any_success() -> None:
    clock = FakeClock()
    cancel, count = FakeEvent(clock), [0]
    budget = Budget(RetryPolicy(budget_seconds=3, first_seconds=1), clock)

    def every_second_fails() -> None:
        count[0] += 1
        if count[0] % 2:
            raise Unreachable("again")

    for _ in range(50):
        with_retries(budget, cancel, every_second_fails)
    assert clock.now > 3


def test_a_spent_budget_raises_the_last_error() -> None:
    clock = FakeClock()
    cancel, count = FakeEvent(clock), [0]

    def action() -> None:
        count[0] += 1
        raise StoreFailing(PLACE, said=str(count[0]))

    with pytest.raises(StoreFailing, match=r"3|4|5|6|7|8|9") as caught:
        with_retries(Budget(RetryPolicy(budget_seconds=5), clock), cancel, action)
    assert f": {count[0]};" in str(caught.value)
    assert 5 <= clock.now < 6


def test_a_budget_of_nothing_means_one_try() -> None:
    clock = FakeClock()
    cancel = FakeEvent(clock)
    with pytest.raises(StoreFailing):
        with_retries(Budget(RetryPolicy(budget_seconds=0), clock), cancel, failing)
    assert cancel.pauses == []


def failing() -> None:
    raise StoreFailing(PLACE)


@pytest.mark.parametrize("error", [CorruptData("bad"), MissingBucket(PLACE), FileNotFoundError()])
def test_what_waiting_can_not_mend_is_not_tried_again(error: Exception) -> None:
    cancel, count = FakeEvent(FakeClock()), [0]

    def action() -> None:
        count[0] += 1
        raise error

    with pytest.raises(type(error)):
        with_retries(Budget(RetryPolicy(), FakeClock()), cancel, action)
    assert count == [1]


def test_a_cancelled_transfer_is_not_tried_at_all() -> None:
    cancel = FakeEvent(FakeClock())
    cancel.set()
    with pytest.raises(Cancelled):
        with_retries(Budget(RetryPolicy(), FakeClock()), cancel, failing)


@pytest.mark.parametrize("bad", [{"first_seconds": -1}, {"factor": 0.5}, {"budget_seconds": -1}])
def test_a_policy_that_makes_no_sense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        RetryPolicy(**bad)
