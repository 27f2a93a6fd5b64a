"""Control blocks of this pod's ranks: read what trainers report, write what the leader says.

Used by the agent. A word of the leader is written only into the block of a rank that trains in the
attempt of that word: an order to an attempt that is over must not reach the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TypeVar

from backstay_protocol.clock import Clock
from backstay_protocol.control import ControlBlock, Word
from backstay_protocol.errors import CorruptData, VersionMismatch
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.messages import ProgressReply, RankProgress
from backstay_protocol.names import LOCAL, NEIGHBOR
from backstay_protocol.topology import Tiers

_NANO = 1_000_000_000
T = TypeVar("T")


class ControlBlocks:
    """One per sidecar; used in the event loop only (reads and writes of mapped words)."""

    def __init__(
        self, memory: MemoryLayout, ranks: Iterable[int], tiers: Tiers, replica: int, clock: Clock
    ) -> None:
        """`ranks`: this pod's. Blocks appear when trainers attach."""
        self._memory = memory
        self._ranks = tuple(ranks)
        self._tiers = tiers
        self._replica = replica
        self._clock = clock
        self._open: dict[int, tuple[tuple[int, int], ControlBlock]] = {}

    def close(self) -> None:
        """Unmap every page."""
        for rank in list(self._open):
            self._forget(rank)

    def progress(self) -> tuple[RankProgress, ...]:
        """What each rank reports of itself."""
        return tuple(_progress(rank, block) for rank, block in self._blocks())

    def states(self) -> dict[int, int]:
        """Rank -> State, of the ranks that have attached."""
        return {rank: block[Word.STATE] for rank, block in self._blocks()}

    def begin(self, rank: int, every_steps: int = 0) -> None:
        """The rank is about to get its go-ahead: from its first step on it saves as configured, or
        as the leader has written into the attempt's record.

        All ranks need the same schedule from the same step on, or they would not meet in the plan
        that the first save of an attempt makes; the leader's word comes too late for that.
        """
        every_steps = every_steps or self._tiers.memory.schedule.every_steps
        for found, block in self._blocks():
            if found == rank and not block[Word.EVERY_STEPS]:
                block[Word.PREVIOUS_EVERY_STEPS] = every_steps
                block[Word.EVERY_STEPS] = every_steps
                self._stamp(block)

    def apply(self, reply: ProgressReply) -> None:
        """Write the leader's word. The caller has checked it against the promise."""
        for _, block in self._blocks():
            if block[Word.ATTEMPT] == reply.attempt and reply.attempt:
                self._write(block, reply)

    def _write(self, block: ControlBlock, reply: ProgressReply) -> None:
        block[Word.COMPLETE_STEP] = reply.complete_step
        block[Word.SAFE_STEP] = self.safe_step(reply)
        block[Word.DURABLE_STEP] = _newest_step(reply.durable)
        orders = reply.orders
        if orders.every_steps and (orders.every_steps, orders.every_from) != (
            block[Word.EVERY_STEPS],
            block[Word.EVERY_FROM],
        ):
            # In this order a rank that looks between two stores still acts on the old interval.
            block[Word.PREVIOUS_EVERY_STEPS] = block[Word.EVERY_STEPS]
            block[Word.EVERY_FROM] = orders.every_from
            block[Word.EVERY_STEPS] = orders.every_steps
        block[Word.SAVE_AT_STEP] = orders.save_at_step
        block[Word.REPLAN_AT_STEP] = orders.replan_at_step
        if orders.leave_replica in (-1, self._replica):
            block[Word.LEAVE_ATTEMPT] = orders.leave_attempt
        self._stamp(block)

    def safe_step(self, reply: ProgressReply) -> int:
        """Newest step that outlives this pod's memory: in local or neighbor, else durable."""
        near = [tier for tier in (LOCAL, NEIGHBOR) if getattr(self._tiers, tier) is not None]
        if not near:
            return _newest_step(reply.durable)
        return max(_newest_step(reply.complete.get(tier, ())) for tier in near)

    def _stamp(self, block: ControlBlock) -> None:
        block[Word.SIDECAR_TIME] = int(self._clock.time() * _NANO)

    def _blocks(self) -> list[tuple[int, ControlBlock]]:
        found = []
        for rank in self._ranks:
            with contextlib.suppress(FileNotFoundError, CorruptData, VersionMismatch):
                found.append((rank, self._block(rank)))
        return found

    def _block(self, rank: int) -> ControlBlock:
        path = self._memory.control(rank)
        stat = os.stat(path)
        inode = (stat.st_dev, stat.st_ino)
        known = self._open.get(rank)
        if known is not None and known[0] == inode:
            return known[1]
        self._forget(rank)  # the volume was emptied and filled anew
        block = ControlBlock(path, create=False)
        self._open[rank] = (inode, block)
        return block

    def _forget(self, rank: int) -> None:
        known = self._open.pop(rank, None)
        if known is not None:
            known[1].close()


def _progress(rank: int, block: ControlBlock) -> RankProgress:
    return RankProgress(
        rank=rank,
        step=block[Word.STEP],
        step_time=block[Word.STEP_TIME] / _NANO,
        published_step=block[Word.PUBLISHED_STEP],
        attempt=block[Word.ATTEMPT],
        state=block[Word.STATE],
        replan_wanted=bool(block[Word.REPLAN_WANTED]),
        saves=block[Word.SAVES],
        skipped=block[Word.SKIPPED],
        stall_seconds=block[Word.STALL_NS] / _NANO,
        every_steps=block[Word.EVERY_STEPS],
        every_from=block[Word.EVERY_FROM],
        leaving=block[Word.LEAVE_SEEN] == block[Word.ATTEMPT] != 0,
    )


def _newest_step(checkpoints: tuple[CheckpointId, ...]) -> int:
    return max((checkpoint.step for checkpoint in checkpoints), default=0)
