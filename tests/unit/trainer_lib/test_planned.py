"""When a rank asks for a plan with all ranks, and what it does while they do not come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backstay.gathering import Gather, GatherFailed
from backstay.plan import NOTHING
from backstay.planned import Planner
from backstay.structure import Structure, walk
from support.restore_fakes import FakeClock


class Rank:
    """Rank 0 of two. The other one comes to a gather only while `together` is true."""

    def __init__(self) -> None:
        self.together = True
        self.wanted: list[bool] = []
        self.gathered: list[tuple[str, bytes]] = []
        self.clock = FakeClock()
        self.take_apart: Callable[[], Structure] = self.walk
        self.entries = {"own": torch.zeros(3)}
        self.planner = Planner(
            lambda: self.take_apart(), self.gather, 0, 2, self.wanted.append, self.clock
        )

    def walk(self) -> Structure:
        return walk(self.entries, rank=0, world_size=2)

    def gather(self, name: str) -> Gather:
        def gather(data: bytes) -> list[bytes]:
            self.gathered.append((name, data))
            if not self.together:
                raise GatherFailed("ranks [1] did not come within 60 s")
            return [data, data]

        return gather

    def save(self, step: int, *, replan: bool = False) -> str:
        return self.planner.for_save(f"1/{step}", replan).plan.id


def test_the_first_save_plans_with_all_and_later_ones_do_not() -> None:
    rank = Rank()
    first, second = rank.save(10), rank.save(20)
    assert first == second != "local"
    assert [name for name, _ in rank.gathered] == ["1/10"]


def test_while_the_others_do_not_come_it_saves_all_that_it_holds() -> None:
    rank = Rank()
    rank.together = False
    assert [rank.save(10), rank.save(20)] == ["local", "local"]
    assert len(rank.gathered) == 1
    assert rank.wanted == [False]


def test_it_asks_again_after_a_while_and_then_after_a_longer_one() -> None:
    rank = Rank()
    rank.together = False
    rank.save(10)
    for step, seconds in [(20, 59), (30, 2)]:
        rank.clock.now += seconds
        rank.save(step)
    assert rank.wanted == [False, True]
    rank.save(40, replan=True)
    assert rank.wanted == [False, True, False]
    rank.clock.now += 119
    rank.save(50)
    assert rank.wanted[3:] == []
    rank.clock.now += 2
    rank.save(60)
    assert rank.wanted[3:] == [True]
    rank.together = True
    assert rank.save(70, replan=True) != "local"
    rank.together = False
    rank.clock.now += 1
    rank.save(80, replan=True)
    rank.clock.now += 61
    rank.save(90)
    assert rank.wanted[-1], "after a plan that came about the pause is short again"


def test_a_rank_that_cannot_plan_says_why_even_if_the_others_do_not_come() -> None:
    rank = Rank()
    rank.together = False

    def broken() -> Structure:
        raise ValueError("two entries have one name")

    rank.take_apart = broken
    with pytest.raises(ValueError, match="one name"):
        rank.save(10)
    assert rank.gathered == [("1/10", NOTHING)]
