"""The Lease: one holder, taken over only after it was silent for its whole duration."""

from __future__ import annotations

import threading

from backstay_operator.cluster import LEASE
from backstay_operator.errors import Unreachable
from backstay_operator.lease import DURATION_SECONDS, Lease, LeaseKeeper, LeaseName
from support.fake_api import FakeClock, FakeCluster


def name(holder: str) -> LeaseName:
    return LeaseName(namespace="backstay", name="op", holder=holder)


async def test_the_first_takes_it_and_the_second_waits_until_it_is_silent() -> None:
    clock = FakeClock()
    cluster = FakeCluster(clock)
    one, two = Lease(cluster, name("one"), clock), Lease(cluster, name("two"), clock)
    assert await one.try_take()
    assert not await two.try_take()
    clock.pass_time(DURATION_SECONDS - 1)
    assert await one.try_take()
    clock.pass_time(DURATION_SECONDS - 1)
    assert not await two.try_take()
    clock.pass_time(DURATION_SECONDS)
    assert await two.try_take()
    assert not await one.try_take()
    lease = cluster.objects[LEASE.kind, "backstay", "op"]["spec"]
    assert (lease["holderIdentity"], lease["leaseTransitions"]) == ("two", 1)


async def test_the_times_of_another_clock_are_not_believed() -> None:
    clock = FakeClock()
    cluster = FakeCluster(clock)
    assert await Lease(cluster, name("one"), clock).try_take()
    clock.pass_time(1000)  # as if the other's clock were far behind
    assert not await Lease(cluster, name("two"), clock).try_take()


async def test_of_two_who_take_it_at_once_one_has_it() -> None:
    clock = FakeClock()
    cluster = FakeCluster(clock)
    one, two = Lease(cluster, name("one"), clock), Lease(cluster, name("two"), clock)
    assert await one.try_take()
    await one.release()

    def race(call: str) -> None:
        if call.startswith("replace"):
            cluster.objects[LEASE.kind, "backstay", "op"]["metadata"]["resourceVersion"] = "x"

    cluster.before = race
    assert not await two.try_take()
    cluster.before = lambda call: None
    assert await two.try_take()


async def test_a_lease_that_was_released_is_free_at_once() -> None:
    clock = FakeClock()
    cluster = FakeCluster(clock)
    one, two = Lease(cluster, name("one"), clock), Lease(cluster, name("two"), clock)
    assert await one.try_take()
    await two.release()  # not its to release
    assert not await two.try_take()
    await one.release()
    assert await two.try_take()


def test_a_keeper_that_can_not_renew_says_that_it_is_lost() -> None:
    clock = FakeClock()
    cluster = FakeCluster(clock)
    told: list[str] = []
    lost = threading.Event()

    def tell(why: str) -> None:
        told.append(why)
        lost.set()

    keeper = LeaseKeeper(lambda: cluster, name("one"), clock, tell)
    keeper.take()

    def away(call: str) -> None:
        clock.pass_time(6)
        raise Unreachable("no answer")

    cluster.before = away
    assert lost.wait(30)
    keeper.give_up()
    assert "no answer" in told[0]


def test_a_keeper_releases_at_the_end() -> None:
    clock = FakeClock()
    cluster = FakeCluster(clock)
    keeper = LeaseKeeper(lambda: cluster, name("one"), clock)
    keeper.take()
    keeper.give_up()
    assert cluster.objects[LEASE.kind, "backstay", "op"]["spec"]["holderIdentity"] == ""
