"""The work queue: each key once, delays and backoff; and the watchdog."""

from __future__ import annotations

import asyncio

import pytest

from backstay_operator.handlers.queue import MOST_BACKOFF_SECONDS, WorkQueue
from backstay_operator.handlers.watchdog import STALE_SECONDS, Watchdog
from backstay_protocol.clock import SYSTEM_CLOCK
from support.fake_api import FakeClock

A, B = ("team", "a"), ("team", "b")


async def test_a_key_that_is_added_often_is_handed_out_once() -> None:
    queue = WorkQueue(FakeClock())
    for _ in range(1000):
        queue.add(A)
    assert len(queue) == 1
    assert await queue.get() == A
    assert len(queue) == 0


async def test_the_earlier_of_two_dates_stands() -> None:
    clock = FakeClock()
    queue = WorkQueue(clock)
    queue.add(A, 10)
    queue.add(A, 30)
    queue.add(B, 20)
    clock.pass_time(20)
    assert [await queue.get(), await queue.get()] == [A, B]


async def test_a_key_that_is_worked_on_comes_again_afterwards_only() -> None:
    queue = WorkQueue(SYSTEM_CLOCK)
    queue.add(A)
    await queue.get()
    queue.add(A)
    queue.add(B)
    assert await queue.get() == B
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0.02)
    assert not waiting.done()
    queue.done(A)
    assert await waiting == A


async def test_an_idle_worker_is_woken_by_a_new_key() -> None:
    queue = WorkQueue(SYSTEM_CLOCK)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add(A)
    assert await waiting == A


def test_failures_wait_longer_each_time_up_to_a_bound_and_begin_anew() -> None:
    queue = WorkQueue(FakeClock())
    waits = [queue.retry(A) for _ in range(20)]
    assert 0.3 < waits[0] < 0.7
    assert waits[3] > waits[0]
    assert max(waits) <= MOST_BACKOFF_SECONDS * 1.25
    queue.succeeded(A)
    assert queue.retry(A) < 0.7
    queue.forget(A)
    assert queue.retry(A) < 0.7


@pytest.mark.parametrize(
    ("later", "stale"), [(STALE_SECONDS - 1, ""), (STALE_SECONDS + 1, "team/a")]
)
def test_a_change_that_no_watch_brings_is_noticed(later: float, stale: str) -> None:
    dog = Watchdog()
    dog.saw(A, "1")
    dog.listed(A, "1", 0)
    dog.listed(A, "2", 10)
    dog.listed(A, "2", 10 + later / 2)
    assert dog.stale(10 + later) == stale


def test_a_watch_that_comes_late_is_well_again() -> None:
    dog = Watchdog()
    dog.listed(A, "2", 0)
    dog.saw(A, "2")
    assert dog.stale(1000) == ""
    dog.listed(B, "1", 0)
    dog.gone(B)
    assert dog.stale(1000) == ""
    dog.listed(A, "3", 0)
    dog.saw(A, "4")
    dog.listed(A, "4", 10)
    assert dog.stale(1000) == ""
