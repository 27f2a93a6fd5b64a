"""The public object: what a training script calls. Everything else in this package works for it.

It ties the parts together and keeps their order: attach to the volume, restore with all ranks, then
step and save, at the end one last save that is waited for. Before training has begun trouble is an
exception that says what to do; afterwards it is a warning (docs/guarantees.md, 5).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, SupportsIndex

from backstay import objects
from backstay.attachment import Attachment
from backstay.capture import SaveResult
from backstay.errors import MisuseError
from backstay.load import Loader, LoadSettings
from backstay.metadata import plain_json
from backstay.restore import Joined, RestorePoint, Round
from backstay.running import CaptureOptions, Running, not_saved
from backstay.saved_objects import OnWorldChange
from backstay.settings import Settings, read_settings, why_off
from backstay.shard_reader import Reach
from backstay.structure import Structure, walk
from backstay.telling import teller, warn
from backstay_protocol.authorities import authorities

EXIT_TIMEOUT_SECONDS = 1800.0
LOAD_THREADS = 4

_said_off: set[str] = set()


class Checkpointer:
    """Saves and restores a training state. One per process, used as a context manager.

    ::

        state = {"model": model, "optimizer": optimizer, "data": sampler, "epoch": 0}
        with backstay.Checkpointer(state) as checkpointer:
            for step in range(checkpointer.restore().step, num_steps):
                train_one_step(...)
                checkpointer.step(step + 1)

    Leaving the block without an exception makes a last save and waits until it is in the outermost
    tier. Outside a Backstay environment, or with `BACKSTAY=off`, it says so once and does nothing.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        gradients: bool = False,
        overlap: bool = True,
        replicated: Collection[str] = (),
        on_world_change: OnWorldChange = "error",
        metadata: Mapping[str, Any] | None = None,
        exit_timeout_seconds: float = EXIT_TIMEOUT_SECONDS,
    ) -> None:
        """Name what makes up the training state. Touches nothing yet.

        `state`: entries by name: modules, optimizers, anything with state_dict() and
        load_state_dict(), tensors, and plain values. Plain values live in this dict: read and write
        them there (`checkpointer.state["epoch"] += 1`); restore() writes them there too.
        `gradients`: save them as well (step() must then be called before zero_grad()).
        `overlap`: copy parameters and optimizer state while the next forward and backward run.
        `replicated`: entries whose plain tensors are equal on all ranks though no DDP says so.
        `on_world_change`: what becomes of values that each rank had for itself (random numbers,
        data position) when the number of ranks changed: "error", or "reset" to leave them as they
        are. An entry with a method `merge_state_dicts(list)` is asked instead: it gets the
        state_dict() of every saved rank and returns what load_state_dict() shall get on this one.
        `metadata`: plain JSON that goes with every checkpoint, as it is now.
        `exit_timeout_seconds`: how long the end of the block waits for the last save.

        Raises MisuseError (an option), UnsupportedValue (`metadata` is not plain JSON).
        """
        if on_world_change not in ("error", "reset"):
            raise MisuseError(
                f'on_world_change is {on_world_change!r}; expected "error" or "reset"'
            )
        if exit_timeout_seconds < 0:
            raise MisuseError(f"exit_timeout_seconds is {exit_timeout_seconds}; expected 0 or more")
        self.state = state
        self.point: RestorePoint | None = None
        """What restore() returned."""
        self._options = CaptureOptions(
            gradients=gradients,
            overlap=overlap,
            replicated=tuple(replicated),
            metadata=plain_json(metadata),
        )
        self._on_world_change: OnWorldChange = on_world_change
        self._exit_timeout_seconds = exit_timeout_seconds
        self._pid = os.getpid()
        self._begun: Running | None = None
        self._attachment: Attachment | None = None
        self._closed = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that left the block
        try:
            if kind is None and self._begun is not None:
                self._begun.finish(self._exit_timeout_seconds)
        finally:
            self.close()

    def restore(self) -> RestorePoint:
        """Begin together with all ranks, from the newest checkpoint that all of them can have.

        Blocks until every rank of the job has called it. Fills the existing tensors in place; where
        nothing was ever saved it leaves everything as it is and returns step 0. Call it once, after
        the state was built and before the first step; before init_process_group where that works.

        Raises MisuseError, UnsupportedValue (something in the state can't be saved), RestoreFailed
        and its kinds: StructureMismatch, WorldSizeChanged, SidecarSilent.
        """
        if self.point is not None:
            raise MisuseError(
                "restore() was called twice; call it once, before the training loop, and keep what "
                "it returns (or read checkpointer.point)"
            )
        if self._closed:
            raise MisuseError("restore() after close(); make a new Checkpointer")
        if why := why_off(os.environ):
            _say_off(why)
            self.point = RestorePoint(step=0, reason=why)
            return self.point
        settings = read_settings(os.environ)
        self._check(settings)
        self._attachment = Attachment(settings, warn)
        try:
            joined, notes = self._restore_with(settings, self._attachment)
            self._begun = Running(self.state, settings, self._attachment, joined, self._options)
        except BaseException:
            self.close()
            raise
        if settings.rank == 0:
            teller(settings)(_told(joined.point))
        for note in notes:
            warn(note)
        self.point = joined.point
        return self.point

    def step(self, step: SupportsIndex, metadata: Mapping[str, Any] | None = None) -> None:
        """Report that `step` optimizer steps are done in all; save if one is due.

        Call it once after each optimizer step, on every rank. It takes microseconds when nothing is
        due. `metadata`: plain JSON that goes with the checkpoint, if this step becomes one; what is
        not JSON is left out, with one warning.
        """
        if self._begun is not None:
            self._begun.step(operator.index(step), metadata)
        elif self.point is None:
            raise MisuseError("step() before restore(): call restore() once before the loop")

    def save(
        self, step: SupportsIndex | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveResult:
        """Save now, to every tier, whatever the schedules say. Call it on every rank.

        `step`: default, the last one that was reported. Returns while the copy may be under way:
        `result()` of what is returned waits for it, `wait(tier=...)` for a tier. Never raises once
        training has begun; `why` says what went wrong.
        """
        if self.point is None:
            raise MisuseError("save() before restore(): call restore() once before the loop")
        if self._begun is None:
            return not_saved(0 if step is None else operator.index(step), self.point.reason)
        return self._begun.save(None if step is None else operator.index(step), metadata)

    def wait(self, tier: str | None = None, timeout: float | None = None) -> bool:
        """Wait for the last save. Returns whether it got there in time (seconds; None: no bound).

        Without `tier`: until no copy is under way, as a hand-written update of parameters needs it.
        A copy that is not waited for to its end goes on.
        With one (`memory`, `local`, `neighbor`, `remote`): until the checkpoint is complete there,
        on all ranks. Raises MisuseError for a tier that is not configured.
        """
        if self._begun is None:
            return True
        return self._begun.wait(tier, timeout)

    def close(self) -> None:
        """Let go of threads and mappings, without a last save. The `with` block calls it."""
        self._closed = True
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()

    def _walk(self, settings: Settings) -> Structure:
        return walk(
            self.state,
            gradients=self._options.gradients,
            rank=settings.rank,
            world_size=settings.world_size,
            replicated=self._options.replicated,
        )

    def _check(self, settings: Settings) -> None:
        """What can't be saved is to be known now, and not at the first save."""
        objects.encode(self._walk(settings).objects())

    def _restore_with(self, settings: Settings, attachment: Attachment) -> tuple[Joined, list[str]]:
        reach = Reach(
            memory=attachment.memory,
            threads=_load_threads(settings),
            store=authorities(settings.s3_ca_file),
        )
        loader = Loader(
            lambda: self._walk(settings),
            LoadSettings(
                rank=settings.rank,
                world_size=settings.world_size,
                reach=reach,
                on_world_change=self._on_world_change,
            ),
        )
        joining = Round(
            attachment.client,
            settings,
            attachment.last_step,
            attachment.last_attempt,
            teller(settings),
        )
        return joining.run(loader), loader.notes


def _told(point: RestorePoint) -> str:
    """A restore in one line, for people."""
    if point.fresh:
        return f"begins at step 0: {point.reason or 'nothing was saved yet'}"
    sources = ", ".join(f"{n / 1e6:.1f} MB from {t}" for t, n in point.sources_of_all.items())
    lost = f", {point.lost_steps} steps lost" if point.lost_steps > 0 else ""
    of = f" of run {point.run}" if point.run else ""
    return "; ".join((f"restored step {point.step}{of} ({sources}){lost}", *point.bad))


def _load_threads(settings: Settings) -> int:
    """Cores are shared with the other ranks of the pod, which load at the same time."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(LOAD_THREADS, cores // settings.local_world_size))


def _say_off(why: str) -> None:
    """Once in a process, by one rank of a job."""
    if why not in _said_off and os.environ.get("RANK", "0") == "0":
        _said_off.add(why)
        warn(f"checkpoints are off: {why}")
