"""Gives every rank's few bytes to every rank, through the store that the process group was made
with.

The planner calls it at the first save of an attempt and at an announced replan. It never starts a
collective of the process group: a rank that does not come (its sidecar died before it saw the
order) would leave the others hanging in one until its time-out, and on a GPU it would queue behind
training. Here whoever waits does so for a bounded time and then plans alone.

Rank 0 collects, and publishes one answer; in the usual case, where all replicas agree, it is as
short for thousands of ranks as for two.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.errors import BackstayError

Gather = Callable[[bytes], list[bytes]]
"""Gives every rank's bytes, in the order of ranks. Raises GatherFailed."""

GATHER_SECONDS = 60.0
ANSWER_SECONDS = 5.0
"""How much longer the others wait for rank 0, which says who is missing."""
FIRST_PAUSE_SECONDS = 0.001
MOST_PAUSE_SECONDS = 0.5
_GONE = "gone"
_MOST_NAMED = 8

logger = logging.getLogger("backstay")


class GatherFailed(BackstayError):
    """Not every rank came in time, or the store is out of reach."""


@dataclass(frozen=True, eq=False)
class World:
    """Who gathers, and through what."""

    store: Store
    rank: int
    size: int


def process_group_world() -> World | None:
    """Of the default process group; None where there is none, or none with a store."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    default_store = getattr(distributed_c10d, "_get_default_store", None)  # not public, much used
    store = default_store() if default_store is not None else None
    if store is None:
        return None
    return World(PrefixStore("backstay", store), dist.get_rank(), dist.get_world_size())


class StoreGathers:
    """Makes the gathers of one rank: one for each name, and all ranks use the same names."""

    def __init__(
        self,
        world: Callable[[], World | None] = process_group_world,
        seconds: float = GATHER_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`seconds`: how long the ranks wait for each other."""
        self._world = world
        self._seconds = seconds
        self._clock = clock
        self._last: list[str] = []
        """Keys of the gather before, kept by rank 0 until all ranks have come to the next."""

    def __call__(self, name: str) -> Gather | None:
        """The gather of this name (attempt and step); None where there is no process group."""
        world = self._world()
        return None if world is None else lambda data: self._gather(world, name, data)

    def _gather(self, world: World, name: str, data: bytes) -> list[bytes]:
        store, rank = world.store, world.rank
        keys = [f"{name}/{r}" for r in range(world.size)]
        answer = f"{name}/all"
        deadline = self._clock.monotonic() + self._seconds
        try:
            store.set(keys[rank], data.hex())
            if rank == 0:
                return self._collect(store, keys, answer, deadline)
            self._wait(store, [answer], deadline + ANSWER_SECONDS)
            return _read(store.get(answer))
        except TimeoutError as error:
            store.set(keys[rank], _GONE)  # who comes later need not wait for us
            raise GatherFailed(
                f"rank 0 gave no answer to the plan within {self._seconds:g} s"
            ) from error
        except dist.DistError as error:
            raise GatherFailed(f"the process group's store is out of reach: {error}") from error

    def _collect(self, store: Store, keys: list[str], answer: str, deadline: float) -> list[bytes]:
        try:
            self._wait(store, keys, deadline)
        except TimeoutError:
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            why = f"ranks {missing[:_MOST_NAMED]} did not come within {self._seconds:g} s"
            return self._give_up(store, answer, why)
        given = [store.get(key).decode() for key in keys]
        gone = [r for r, data in enumerate(given) if data == _GONE]
        if gone:
            return self._give_up(store, answer, f"ranks {gone[:_MOST_NAMED]} waited in vain before")
        for key in self._last:
            store.delete_key(key)
        self._last = [*keys, answer]
        store.set(answer, _written(given))
        return [bytes.fromhex(data) for data in given]

    def _give_up(self, store: Store, answer: str, why: str) -> list[bytes]:
        store.set(answer, json.dumps({"failed": why}))
        raise GatherFailed(why)

    def _wait(self, store: Store, keys: list[str], deadline: float) -> None:
        """Look again and again: a wait would keep the store's connection from the process group's
        own threads, and stores differ in how they say that nothing came.
        """
        pause = FIRST_PAUSE_SECONDS
        while not store.check(keys):
            if self._clock.monotonic() >= deadline:
                raise TimeoutError
            self._clock.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)


def _written(given: Sequence[str]) -> str:
    """Each distinct value once, and runs of ranks that gave it."""
    distinct: dict[str, int] = {}
    runs: list[list[int]] = []
    for data in given:
        index = distinct.setdefault(data, len(distinct))
        if runs and runs[-1][0] == index:
            runs[-1][1] += 1
        else:
            runs.append([index, 1])
    return json.dumps({"distinct": list(distinct), "runs": runs})


def _read(answer: bytes) -> list[bytes]:
    said = json.loads(answer)
    if "failed" in said:
        raise GatherFailed(said["failed"])
    distinct = [bytes.fromhex(text) for text in said["distinct"]]
    return [distinct[index] for index, count in said["runs"] for _ in range(count)]
