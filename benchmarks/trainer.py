"""A trainer process: a real Checkpointer, and the limits measured beside it in the same process.

Started by `job`, one life each. Samples go to stdout as JSON lines, `done` after the last; then it
waits to be killed, as a crash would, or for stdin to end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

import backstay
from backstay import checkpointer as entrance
from backstay.load import Loader
from backstay.restore import Loaded
from backstay_protocol.control import ControlBlock, Word
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout
from backstay_protocol.messages import Decision, ShardSources, Source
from backstay_protocol.names import ENV_VOLUME, MEMORY, URL_SHARD, URL_SHARD_MANIFEST
from benchmarks import limits
from benchmarks.figures import Sample, sample
from benchmarks.job import LOCAL_STEPS, MEMORY_STEPS, TOKEN
from benchmarks.state import State

WARM_STEPS = 3
SLOT_SECONDS = 120.0
"""Slots are made in the background of the first steps."""
TIER_SECONDS = 300.0
COPIES_IN_COMPUTE = 3
"""Forward and backward take so many times as long as the copy."""
LOOK_SECONDS = 0.01


def emit(found: Sample) -> None:
    print(json.dumps(asdict(found)), flush=True)


# --- saves ----------------------------------------------------------------------------------------


def synchronous(options: argparse.Namespace) -> None:
    """Restore what there is, then saves whose copy is made in the call."""
    state = State(options.mib, options.tensors)
    state.step()
    with _volume_beside(options) as folder:
        copy = limits.Copy(list(state.tensors().values()), folder)
        with backstay.Checkpointer(state.entries, overlap=False) as checkpointer:
            step = _restore(checkpointer, state, options)
            _warm_up(checkpointer, state, step, options)
            calls, units = [], [copy()]
            for number in range(options.rounds + 1):
                calls.append(_timed(partial(checkpointer.step, _memory_step(step, number))))
                assert checkpointer.wait(MEMORY, TIER_SECONDS), "the save was not published"
                state.step()
                units.append(copy())
            _tell_saves(calls, units)
            checkpointer.save(_memory_step(step, options.rounds + 1))
            assert checkpointer.wait("local", TIER_SECONDS)
            _finish()


def _tell_saves(calls: list[float], units: list[float]) -> None:
    """Each against the limits around it; the first against the median of the later ones."""
    ratios = [2 * c / (a + b) for c, a, b in zip(calls, units, units[1:], strict=False)]
    for call, before, after in zip(calls[1:], units[1:], units[2:], strict=False):
        emit(sample("sync", call, (before + after) / 2))
    later = statistics.median(ratios[1:])
    emit(sample("first", ratios[0] * units[0], later * units[0]))


def overlapped(options: argparse.Namespace) -> None:
    """Saves that are copied while forward and backward run, and become durable beside training."""
    state = State(options.mib, options.tensors)
    state.step()
    with _volume_beside(options) as folder:
        copy = limits.Copy(list(state.tensors().values()), folder)
        disk = limits.Disk(copy.memory, Path(options.disk))
        compute = COPIES_IN_COMPUTE * max(copy(), copy())
        memory = _Memory(options.sidecar)
        with memory, backstay.Checkpointer(state.entries) as checkpointer:
            step = checkpointer.restore().step
            _warm_up(checkpointer, state, step, options)
            for number in range(2):  # the first two are judged by the training thread
                checkpointer.step(_memory_step(step, number))
                state.step(compute)
                assert checkpointer.wait(MEMORY, TIER_SECONDS)
            saves = _DurableSaves(checkpointer, state, compute, options)
            before = disk()
            for number in range(options.rounds):
                durable = saves(_local_step(step, number + 3))
                after = disk()
                emit(sample("durable", durable, (before + after) / 2))
                before = after
            memory.tell(state.num_bytes)
            _finish()


class _DurableSaves:
    """One save after the other, each seen to the disk while training goes on."""

    def __init__(
        self,
        checkpointer: backstay.Checkpointer,
        state: State,
        compute: float,
        options: argparse.Namespace,
    ) -> None:
        self._checkpointer, self._state, self._compute = checkpointer, state, compute
        self._options = options
        self._control = ControlBlock(MemoryLayout(_volume()).control(0), create=False)

    def __call__(self, step: int) -> float:
        """Seconds until the manifest is on the disk; tells of the rest."""
        alone = [self._step() for _ in range(2)]
        control, checkpointer = self._control, self._checkpointer
        before = control[Word.STALL_NS]
        begun = time.perf_counter()
        checkpointer.step(step)
        call = time.perf_counter() - begun
        watch = _Watch(self._manifests, step)
        stalled = (control[Word.STALL_NS] - before) / 1e9
        beside = [self._step()]
        waited = (control[Word.STALL_NS] - before) / 1e9 - stalled
        emit(sample("call", 1e3 * call, 2.0))
        emit(sample("hook", 1e3 * waited, 1.0))
        while not watch.seen.is_set():
            beside.append(self._step())
        emit(sample("slow", statistics.fmean(beside), statistics.fmean(alone)))
        return watch.when - begun

    def _step(self) -> float:
        return _timed(lambda: self._state.step(self._compute))

    def _manifests(self, step: int) -> list[Path]:
        area = Path(DiskLayout(self._options.disk, "default/bench", 0).shards)
        return [
            path
            for path in area.glob("*/*.json")
            if CheckpointId.parse(path.parent.name).step == step
        ]


class _Watch:
    """Looks in a thread of its own for the manifest of a step."""

    def __init__(self, manifests: Callable[[int], list[Path]], step: int) -> None:
        self.seen = threading.Event()
        self.when = 0.0
        self._manifests, self._step = manifests, step
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        deadline = time.perf_counter() + TIER_SECONDS
        while not self._manifests(self._step):
            assert time.perf_counter() < deadline, "the save never became durable"
            time.sleep(LOOK_SECONDS)
        self.when = time.perf_counter()
        self.seen.set()


class _Memory:
    """Private memory of trainer and sidecar beyond what training alone takes, and slots."""

    def __init__(self, sidecar: int) -> None:
        self._sidecar = sidecar
        self._stop = threading.Event()

    def __enter__(self) -> _Memory:
        self._before = _private_bytes("self")
        self._own, self._beside = 0, 0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            self._own = max(self._own, _private_bytes("self") - self._before)
            self._beside = max(self._beside, _private_bytes(str(self._sidecar)))

    def tell(self, state_bytes: int) -> None:
        slots = sum(
            path.stat().st_blocks * 512 for path in Path(_volume(), "ranks").glob("*/slot-*")
        )
        extra = self._own + self._beside + slots
        emit(sample("extra", extra / 1e9, state_bytes / 1e9))
        emit(sample("sidecar", self._beside / 1e9, state_bytes / 1e9))


def _private_bytes(process: str) -> int:
    """Anonymous memory: pages of slots and files are counted once, as what they are."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


# --- restores -------------------------------------------------------------------------------------


def holder(options: argparse.Namespace) -> None:
    """A rank with next to nothing, whose node keeps its neighbour's copy."""
    state = State(1, 8)
    with backstay.Checkpointer(state.entries) as checkpointer:
        step = checkpointer.restore().step
        if not step:
            checkpointer.save(LOCAL_STEPS)
        _finish()


def owner(options: argparse.Namespace) -> None:
    """The rank with the state: brings it to its neighbour, or gets it back from there."""
    state = State(options.mib, options.tensors)
    state.step()
    with backstay.Checkpointer(state.entries) as checkpointer:
        step = _restore(checkpointer, state, options)
        if not step:
            _warm_up(checkpointer, state, step, options)
            with _volume_beside(options) as folder:
                copy = limits.Copy(list(state.tensors().values()), folder)
                disk = limits.Disk(copy.memory, Path(options.disk))
                before = disk()
                begun = time.perf_counter()
                checkpointer.save(LOCAL_STEPS)
                assert checkpointer.wait("neighbor", TIER_SECONDS), "no copy at the neighbour"
                seconds = time.perf_counter() - begun
                emit(sample("keep", seconds, (before + disk()) / 2))
        _finish()


def _restore(checkpointer: backstay.Checkpointer, state: State, options: argparse.Namespace) -> int:
    """The step restored. Loads are repeated inside, each between two runs of its limit."""

    class Measured(Loader):
        def __call__(self, decision: Decision) -> Loaded:
            if decision.base is None:
                return super().__call__(decision)
            return _measured_loads(super().__call__, decision, options)

    vars(entrance)["Loader"] = Measured
    return checkpointer.restore().step


def _measured_loads(
    load: Callable[[Decision], Loaded], decision: Decision, options: argparse.Namespace
) -> Loaded:
    own = next(shard for shard in decision.shards if shard.rank == 0)
    existing = limits.Existing(own.size)
    source = own.sources[0]
    if source.path:
        existing.read(source.path)  # into the page cache
        loaded = _pairs(source.tier, load, decision, lambda: existing.read(source.path), options)
        if source.tier != MEMORY:
            return loaded
        decision, key = _by_the_wire(decision, options), "peer"
    else:
        key = "neighbor"
    address = ("127.0.0.1", options.stream)
    num_bytes = own.size / 1e9
    before = existing.receive(address)
    for _ in range(options.rounds):
        seconds, loaded = _load(load, decision)
        after = existing.receive(address)
        emit(sample(key, num_bytes / seconds, 2 * num_bytes / (before + after)))
        before = after
    return loaded


def _pairs(
    key: str,
    load: Callable[[Decision], Loaded],
    decision: Decision,
    limit: Callable[[], float],
    options: argparse.Namespace,
) -> Loaded:
    before = limit()
    for _ in range(options.rounds):
        seconds, loaded = _load(load, decision)
        after = limit()
        emit(sample(key, seconds, (before + after) / 2))
        before = after
    return loaded


def _load(load: Callable[[Decision], Loaded], decision: Decision) -> tuple[float, Loaded]:
    begun = time.perf_counter()
    loaded = load(decision)
    seconds = time.perf_counter() - begun
    assert loaded.ok, loaded
    return seconds, loaded


def _by_the_wire(decision: Decision, options: argparse.Namespace) -> Decision:
    """The same shards, as another node's rank would get them from this sidecar's memory."""

    def remote(rank: int) -> Source:
        def url(path: str) -> str:
            filled = path.format(checkpoint=decision.base, rank=rank)
            return f"http://{options.api}{filled}?tier={MEMORY}"

        return Source(
            tier=MEMORY,
            holder=0,
            url=url(URL_SHARD),
            manifest_url=url(URL_SHARD_MANIFEST),
            headers={"Authorization": f"Bearer {TOKEN}"},
        )

    shards = tuple(replace(s, sources=(remote(s.rank),)) for s in decision.shards)
    return replace(decision, shards=shards)


def fresh(options: argparse.Namespace) -> None:
    """A restart as scripts make it: the optimizer's state does not exist before the restore."""
    state = State(options.mib, options.tensors)
    loads: list[tuple[float, ShardSources]] = []

    class Measured(Loader):
        def __call__(self, decision: Decision) -> Loaded:
            seconds, loaded = _load(super().__call__, decision)
            loads.append((seconds, decision.shards[0]))
            return loaded

    vars(entrance)["Loader"] = Measured
    with backstay.Checkpointer(state.entries) as checkpointer:
        whole = _timed(checkpointer.restore)
        seconds, shard = loads[-1]
        existing = limits.Existing(shard.size)
        limit = min(existing.read(shard.sources[0].path) for _ in range(2))
        emit(sample("fresh", seconds, limit))
        emit(sample("round", whole, limit))
        _finish()


# --- shared ---------------------------------------------------------------------------------------


def _warm_up(
    checkpointer: backstay.Checkpointer, state: State, step: int, options: argparse.Namespace
) -> None:
    """The first steps of a training run; slots are made meanwhile."""
    for number in range(WARM_STEPS):
        state.step()
        checkpointer.step(step + number + 1)
    deadline = time.monotonic() + SLOT_SECONDS
    while _slot_bytes() < 2 * state.num_bytes:
        assert time.monotonic() < deadline, "the slots were not made in time"
        state.compute(0.1)
    state.compute(1.0)


def _slot_bytes() -> int:
    return sum(path.stat().st_blocks * 512 for path in Path(_volume(), "ranks/0").glob("slot-?"))


def _memory_step(step: int, number: int) -> int:
    """Steps that are due for memory only."""
    return _local_step(step, number) + MEMORY_STEPS


def _local_step(step: int, number: int) -> int:
    """Steps that are due for both tiers."""
    return step - step % LOCAL_STEPS + (number + 1) * LOCAL_STEPS


def _volume() -> str:
    return os.environ[ENV_VOLUME]


@contextmanager
def _volume_beside(options: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=Path(_volume()).parent) as folder:
        yield Path(folder)


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _finish() -> None:
    """Say so and wait for the end."""
    print("done", flush=True)
    sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = {f.__name__: f for f in (synchronous, overlapped, holder, owner, fresh)}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--stream", type=int, default=0, help="port of the raw TCP stream")
    parser.add_argument("--sidecar", type=int, required=True, help="its process id")
    parser.add_argument("--api", required=True, help="host:port of this replica's sidecar")
    parser.add_argument("--disk", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds[options.kind](options)


if __name__ == "__main__":
    main()
