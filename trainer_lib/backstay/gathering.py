"""Gives every rank's few bytes to every rank, through the store that the process group was made
with.

The planner calls it at the first save of an attempt and at an announced replan. It never starts a
collective of the process group: a rank that does not come (its sidecar died before it saw the
order) would leave the others hanging in one until its time-out, and on a GPU it would queue behind
training. Here whoever waits does so for a bounded time and then plans alone.

Rank 0 collects, and publishes one answer; in the usual case, where all replicas agree, it is as
short for thousands of ranks as for two. Each rank looks whether its own bytes stand in the answer:
who plans by another answer than the rest would leave tensors out of a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn

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
STORE_SECONDS = 5.0
"""How much longer than that a store may take with its answers."""
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
    counted_as: int | None = None
    """Its rank by the environment; None: the same."""


def process_group_world(rank: int | None = None, size: int | None = None) -> World | None:
    """Of the default process group; None where there is none, or none with a store, or one of
    another size than the world that saves. `rank` and `size`: the environment's.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if size not in (None, dist.get_world_size()):
        return None
    default_store = getattr(distributed_c10d, "_get_default_store", None)  # not public, much used
    store = default_store() if default_store is not None else None
    if store is None:
        return None
    return World(PrefixStore("backstay", store), dist.get_rank(), dist.get_world_size(), rank)


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
        self._talk: threading.Thread | None = None
        """With the store, in the newest gather."""

    def __call__(self, name: str) -> Gather | None:
        """The gather of this name (attempt and step); None where there is no process group."""
        world = self._world()
        return None if world is None else lambda data: self._gather(world, name, data)

    def _gather(self, world: World, name: str, data: bytes) -> list[bytes]:
        """Bounded, whatever the store does: TCPStore waits without end for a server that hangs."""
        if self._talk is not None and self._talk.is_alive():
            raise GatherFailed("the process group's store does not answer since the last plan")
        outcome: Future[list[bytes]] = Future()
        over = threading.Event()

        def talk() -> None:
            try:
                outcome.set_result(self._exchange(world, name, data, over))
            except GatherFailed as error:
                outcome.set_exception(error)
            except Exception as error:  # noqa: BLE001 - each kind of store raises what it likes
                why = f"the process group's store is out of reach: {error}"
                outcome.set_exception(GatherFailed(why))

        self._talk = threading.Thread(target=talk, name="backstay-gather", daemon=True)
        self._talk.start()
        bound = self._seconds + ANSWER_SECONDS + STORE_SECONDS
        try:
            given = outcome.result(bound)
        except TimeoutError as error:
            why = f"the process group's store does not answer within {bound:g} s"
            raise GatherFailed(why) from error
        finally:
            over.set()
        self._talk.join()
        return given

    def _exchange(self, world: World, name: str, data: bytes, over: threading.Event) -> list[bytes]:
        store, rank = world.store, world.rank
        keys = [f"{name}/{r}" for r in range(world.size)]
        answer = f"{name}/all"
        deadline = self._clock.monotonic() + self._seconds
        if world.counted_as not in (None, rank):
            self._refuse(world, keys[rank], answer)
        store.set(keys[rank], data.hex())
        if rank == 0:
            return self._collect(store, keys, answer, deadline, over)
        if not self._comes(store, [answer], deadline + ANSWER_SECONDS, over):
            with contextlib.suppress(Exception):  # as above: a store raises what it likes
                store.set(keys[rank], _GONE)  # who comes later need not wait for us
            raise GatherFailed(f"rank 0 gave no answer to the plan within {self._seconds:g} s")
        given = _read(store.get(answer))
        if len(given) != world.size or given[rank] != data:
            raise GatherFailed("the answer to the plan is that of another world")
        return given

    def _refuse(self, world: World, key: str, answer: str) -> None:
        """Owners follow from the group's ranks, files from the environment's: all must know."""
        why = (
            f"rank {world.rank} of the process group is started with RANK={world.counted_as}; "
            "give init_process_group the ranks of the environment"
        )
        if world.rank == 0:
            self._give_up(world.store, answer, why)
        world.store.set(key, _GONE)
        raise GatherFailed(why)

    def _collect(
        self,
        store: Store,
        keys: list[str],
        answer: str,
        deadline: float,
        over: threading.Event,
    ) -> list[bytes]:
        if not self._comes(store, keys, deadline, over):
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            why = f"ranks {missing[:_MOST_NAMED]} did not come within {self._seconds:g} s"
            self._give_up(store, answer, why)
        given = [store.get(key).decode() for key in keys]
        gone = [r for r, data in enumerate(given) if data == _GONE]
        if gone:
            why = (
                f"ranks {gone[:_MOST_NAMED]} waited in vain before, or have another RANK than in "
                "the process group"
            )
            self._give_up(store, answer, why)
        with contextlib.suppress(Exception):  # not every store can delete, and none has to
            for key in self._last:
                store.delete_key(key)
        self._last = [*keys, answer]
        if over.is_set():
            raise GatherFailed("the store took too long")  # nobody hears it: the plan is made
        store.set(answer, _written(given))
        return [bytes.fromhex(data) for data in given]

    def _give_up(self, store: Store, answer: str, why: str) -> NoReturn:
        store.set(answer, json.dumps({"failed": why}))
        raise GatherFailed(why)

    def _comes(self, store: Store, keys: list[str], deadline: float, over: threading.Event) -> bool:
        """Look again and again: a wait would keep the store's connection from the process group's
        own threads, and stores differ in how they say that nothing came.
        """
        pause = FIRST_PAUSE_SECONDS
        while not store.check(keys):
            if over.is_set() or self._clock.monotonic() >= deadline:
                return False
            self._clock.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)
        return True


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
