"""The capture engine: brings the state of one moment into a slot while training goes on.

One save: plan (or see that the plan still holds) -> encode the values -> choose and withdraw a slot
-> copy the *early* set -> return. The copy thread copies the *late* set while the next forward and
backward run, writes header and objects and publishes the manifest. Before any optimizer changes a
late tensor a global pre-hook waits for the copy. A late tensor whose version moved all the same
means: nothing is published, a warning names it, and it is early from then on.

Called by the Checkpointer. Once training has begun nothing here raises into it: trouble is logged,
told to the sidecar and stands in the result. It never talks to other ranks except to plan, at the
first save and when told to (`replan`).

| part | module |
|---|---|
| names, owners, layout | structure, plan, planned, shardfile |
| what may be late | trust |
| slots | slotmap, slotchoice, slotkeeper |
| bytes | copying, savejob |
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from backstay import objects, plan, rng
from backstay.copying import Copy, Streams, Transfer, batches
from backstay.errors import UnsupportedValue
from backstay.gathering import Gather, StoreGathers, process_group_world
from backstay.planned import Division, Planned, Planner
from backstay.savejob import CopyThread, Job, NewestThread, SaveResult, Skip
from backstay.slotchoice import Chain
from backstay.slotkeeper import Bounds, SlotKeeper
from backstay.slotmap import Mapping as SlotMapping
from backstay.slotmap import Slot, SlotMap
from backstay.structure import NamedTensor, Structure, walk
from backstay.trust import Trust, graph_is_recorded
from backstay_protocol import slots as protocol
from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.control import ControlBlock, Word
from backstay_protocol.faults import fault
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import SCHEDULE, Manifest
from backstay_protocol.messages import CaptureNotice
from backstay_protocol.names import DEFAULT_CHUNK_BYTES, DEFAULT_SLOTS, RESERVED

__all__ = ["ABSENT_GRADIENTS_KEY", "RNG_KEY", "Bounds", "CaptureEngine", "SaveResult"]

logger = logging.getLogger("backstay")

RNG_KEY = f"{RESERVED}rng"
ABSENT_GRADIENTS_KEY = f"{RESERVED}absent_gradients"
SLOT_SPARE_BYTES = 1 << 20
SAVES_ON_PROBATION = 2
HEADER_BYTES_A_PARAMETER = 1000  # its entry and those of its optimizer state
CLOSE_SECONDS = 60.0
LAST_NOTICE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One save as it was asked for."""

    chain: Chain
    reason: str
    metadata: Mapping[str, Any] | None
    replan: bool
    overlap: bool


class CaptureEngine:
    """Saves of one rank, one after the other. The hooks may fire in any thread."""

    def __init__(
        self,
        entries: Mapping[str, Any],
        *,
        memory: MemoryLayout,
        run: str,
        rank: int = 0,
        world_size: int = 1,
        replica: int = 0,
        control: ControlBlock | None = None,
        num_slots: int = DEFAULT_SLOTS,
        gradients: bool = False,
        overlap: bool = True,
        replicated: Collection[str] = (),
        chunk_size: int = DEFAULT_CHUNK_BYTES,
        gather: Callable[[str], Gather | None] | None = None,
        bounds: Bounds | None = None,
        notify: Callable[[CaptureNotice], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Attach: no slot is made before `check`.

        `gather` is asked at each plan, by name, for a way to reach all ranks; without one it is
        the process group's store. `notify` is called in a
        thread of its own after saves, published or not: while it is under way only the newest save
        waits to be told. `replicated`: entries whose plain tensors the user declares equal on all
        ranks.
        """
        self._entries = entries
        self._memory = memory
        self._run = run
        self._rank, self._world_size, self._replica = rank, world_size, replica
        self._control = control
        self._gradients, self._overlap = gradients, overlap
        self._replicated = tuple(replicated)
        self._chunk_size = chunk_size
        self._bounds = bounds or Bounds()
        self._notify = notify
        self._last_told = (-1, "")
        """Step and reason of the last save that was told not to be."""
        self._clock = clock
        self._slots = SlotMap(memory, rank, num_slots, clock=clock)
        self._keeper = SlotKeeper(memory, rank, self._slots, self._told, self._bounds, clock)
        gather = gather or StoreGathers(lambda: process_group_world(rank, world_size))
        self._planner = Planner(self._walk, gather, rank, world_size, self._want_replan, clock)
        self._trust = Trust()
        self._streams = Streams()
        self._thread = CopyThread()
        self._notices = NewestThread("backstay-notice")
        self._job: Job | None = None
        self._num_overlapped = 0
        self._mentioned = ""
        self._checked: Structure | None = None
        self._blob_bytes = 0
        self._gone = False
        self._hook = register_optimizer_step_pre_hook(
            torch.compiler.disable(self._before_optimizer_step)  # type: ignore[no-untyped-call]
        )
        _engines.add(self)

    # --- before training -----------------------------------------------------------------------

    def check(self) -> Structure:
        """Take the entries apart and encode their values once; begin to make the slots.

        Raises UnsupportedValue: what can't be saved is to be known before training begins.
        """
        structure = self._checked = self._walk()
        encoded = objects.encode(self._values(structure))
        self._blob_bytes = len(encoded.json)
        self._reserve_for(structure)
        return structure

    def _walk(self) -> Structure:
        return walk(
            self._entries,
            gradients=self._gradients,
            rank=self._rank,
            world_size=self._world_size,
            replicated=self._replicated,
        )

    def _reserve_for(self, structure: Structure) -> None:
        """By estimate: owners are not known before the first plan."""
        parameters = len(structure.tensors) + sum(len(o.parameters) for o in structure.optimizers)
        around = parameters * HEADER_BYTES_A_PARAMETER + 2 * self._blob_bytes + SLOT_SPARE_BYTES
        size = plan.estimated_bytes(structure) + around
        self._slots.reserve(size, register=_uses_cuda(structure))

    def _prepare(self, structure: Structure) -> None:
        """So that the first save finds slots that are large enough."""
        try:
            self._reserve_for(structure)
        except Exception:  # only an estimate: the save itself will say what is wrong
            logger.debug("slots could not be prepared", exc_info=True)

    # --- a save, in the training thread --------------------------------------------------------

    def save(
        self,
        step: int,
        attempt: int,
        *,
        chain: Chain = (),
        reason: str = SCHEDULE,
        metadata: Mapping[str, Any] | None = None,
        replan: bool = False,
        overlap: bool | None = None,
    ) -> SaveResult:
        """Capture the state as it is now, as (step, attempt). Never raises.

        Returns while the copy may still be under way; with `overlap=False` when it is over.
        `chain`: lineage of the attempt, as manifests carry it. `replan`: all ranks plan anew in
        this save (collective). The first save always plans.
        """
        result = SaveResult(step, attempt)
        if self._gone:
            result.why = "the checkpointer is closed, or this is a forked child"
            result.done.set()
            return result
        begun = self._clock.monotonic()
        overlap = self._overlap if overlap is None else overlap
        request = _Request(
            chain=tuple(chain), reason=reason, metadata=metadata, replan=replan, overlap=overlap
        )
        try:
            self._begin(result, request)
            if not overlap:
                self._settle(self._bounds.copy_seconds)
        except (Skip, UnsupportedValue) as skip:
            self._give_up(result, str(skip))
        except Exception as error:  # invariant 5: our own trouble never stops training
            logger.exception("save of step %d failed", step)
            self._give_up(result, f"{type(error).__name__}: {error}")
        self._stalled(result, self._clock.monotonic() - begun)
        return result

    def _begin(self, result: SaveResult, request: _Request) -> None:
        settled = self._settle(self._bounds.copy_seconds)
        name = f"{result.attempt}/{result.step}"
        planned = self._planner.for_save(name, request.replan)  # before anything here gives up
        metadata = _as_it_is_now(request.metadata)
        if not settled:
            raise Skip("the copy of an earlier save is still under way")
        self._slots.drop_retired()
        encoded = objects.encode(self._values(planned.structure), planned.taken)
        planned, extras, frame = self._planner.frame(planned, encoded)
        self._make_room(frame.size, planned)
        slot, mapping = self._keeper.acquire(frame.size, result.attempt, request.chain)
        result.slot = slot.index
        division = self._divide(planned, slot, mapping, request.overlap)
        passing = _gradients_now(division)
        for item, start, (_, tensor) in zip(extras, frame.starts, encoded.tensors, strict=True):
            passing.append(Copy(mapping.view(start, item.dtype, item.shape), tensor))
        early = (*division.early, *batches(passing))
        versions = division.watched.versions()
        transfer = Transfer(self._streams, early, division.late)
        transfer.start()
        on_probation = bool(division.late) and self._num_overlapped < SAVES_ON_PROBATION
        self._num_overlapped += bool(division.late)
        job = self._job = Job(
            result=result,
            transfer=transfer,
            mapping=mapping,
            frame=frame,
            blob=encoded.json,
            manifest=lambda: self._manifest(result, planned, frame.size, request, metadata),
            watched=division.watched,
            versions=versions,
            training_judges=on_probation,
            sources=passing,
        )
        self._thread.run(lambda: self._carry_out(job))

    def _values(self, structure: Structure) -> dict[str, Any]:
        values = {**structure.objects(), RNG_KEY: rng.capture()}
        if self._gradients:
            values[ABSENT_GRADIENTS_KEY] = [
                name for name, parameter in structure.gradients.items() if parameter.grad is None
            ]
        return values

    def _make_room(self, size: int, planned: Planned) -> None:
        """Let the slots grow, unless only this rank holds more than planned: that passes."""
        slots = self._slots
        if all(slot.capacity >= size for slot in slots.slots):
            return
        if planned.left_alone and slots.asked_for:
            if any(slot.capacity >= size for slot in slots.slots):
                return
            raise Skip(
                f"all that this rank holds ({size} bytes) does not fit into its slots; saves go on "
                "when all ranks have planned anew"
            )
        if slots.trouble and slots.trouble != self._mentioned:
            logger.warning("%s", slots.trouble)
            self._mentioned = slots.trouble
        slots.reserve(size + size // 64 + SLOT_SPARE_BYTES, register=planned.on_cuda)

    def _divide(
        self, planned: Planned, slot: Slot, mapping: SlotMapping, overlap: bool
    ) -> Division:
        """What is copied early, what late, by what is known of the optimizers now."""
        watched = self._trust.watched() if overlap else frozenset()

        def is_late(tensor: NamedTensor) -> bool:
            return self._trust.is_late(tensor, watched, parameters_on_cuda=planned.on_cuda)

        return planned.divide(slot, mapping, (watched, self._trust.num_lost), is_late)

    def _manifest(
        self,
        result: SaveResult,
        planned: Planned,
        size: int,
        request: _Request,
        metadata: dict[str, Any],
    ) -> Manifest:
        return Manifest(
            run=self._run,
            step=result.step,
            attempt=result.attempt,
            rank=self._rank,
            world_size=self._world_size,
            replica=self._replica,
            plan=planned.plan.id,
            size=size,
            created=self._clock.time(),
            chain=request.chain,
            chunk_size=self._chunk_size,
            reason=request.reason,
            metadata=metadata,
        )

    # --- between saves -------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Return when no copy is under way, before a hand-written update. None: no bound.

        False: timed out, and the copy goes on.
        """
        job = self._job
        if self._gone or job is None:
            return True
        begun = self._clock.monotonic()
        settled = self._settle(timeout, give_up=False)
        self._stalled(job.result, self._clock.monotonic() - begun)
        return settled

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before any optimizer changes anything: the copy of the late set must be over."""
        if self._gone:
            return
        graphed = graph_is_recorded()
        fires = self._trust.fired(optimizer, graphed=graphed)
        if fires == 2 and self._checked is not None and self._planner.current is None:
            self._prepare(self._checked)  # its state exists now
        job = self._job
        if job is None or job.result.done.is_set() or graphed:
            return
        begun = self._clock.monotonic()
        self._hold_back(job, self._bounds.copy_seconds)
        self._stalled(job.result, self._clock.monotonic() - begun)

    def _hold_back(self, job: Job, timeout: float | None, *, give_up: bool = True) -> None:
        """Wait for the copy; if that takes too long give the save up rather than training.

        Once: nothing needs the copy of a save that was given up.
        """
        if job.abandoned:
            return
        copied = job.transfer.hold_back_training(timeout)
        if give_up and not copied:
            job.abandoned = True
        if copied or job.abandoned:
            job.judge()

    def _settle(self, timeout: float | None, *, give_up: bool = True) -> bool:
        """See the save under way to its end, within `timeout` in all."""
        job = self._job
        if job is None:
            return True
        begun = self._clock.monotonic()
        self._hold_back(job, timeout, give_up=give_up)
        if give_up and job.abandoned:
            timeout = 0.0
        elif timeout is not None:
            timeout = max(0.0, timeout - (self._clock.monotonic() - begun))
        if not job.result.done.wait(timeout):
            return False
        self._job = None
        return True

    # --- in the copy thread --------------------------------------------------------------------

    def _carry_out(self, job: Job) -> None:
        result = job.result
        try:
            job.transfer.run_late(lambda: fault("capture.mid_copy"))
            job.transfer.finish()
            job.write_around()
            if job.training_judges:
                job.judged.wait()
            else:
                job.judge()
            self._publish(job)
        except Exception as error:  # the copy thread must live, and training goes on
            logger.exception("save of step %d failed", result.step)
            result.why = f"{type(error).__name__}: {error}"
        result.done.set()
        self._report(result)

    def _publish(self, job: Job) -> None:
        result = job.result
        if job.abandoned:
            result.why = "the copy took too long; training went on without it"
            return
        if job.moved:
            self._trust.lose(job.moved)
            result.why = (
                f"{_some(job.moved)} changed while being copied, before any optimizer's step; "
                "copied at once from now on"
            )
            return
        fault("capture.before_publish")
        protocol.publish(self._memory, self._rank, result.slot, job.manifest())
        self._keeper.published(result.slot, CheckpointId(result.step, result.attempt))
        result.published = True
        fault("capture.after_publish")
        self._tell(Word.PUBLISHED_STEP, result.step)
        self._tell(Word.PUBLISHED_TIME, int(self._clock.time() * 1e9))

    def _give_up(self, result: SaveResult, why: str) -> None:
        result.why = why
        result.done.set()
        self._thread.run(lambda: self._report(result))

    def _report(self, result: SaveResult) -> None:
        if result.published:
            self._add(Word.SAVES, 1)
        else:
            self._add(Word.SKIPPED, 1)
            if (
                result.step,
                result.why,
            ) != self._last_told:  # the end of a run tries again and again
                logger.warning("step %d was not saved: %s", result.step, result.why)
            self._last_told = (result.step, result.why)
        if self._notify is None:
            return
        notice = CaptureNotice(
            rank=self._rank,
            slot=result.slot,
            step=result.step,
            attempt=result.attempt,
            published=result.published,
            why=result.why,
            stall_seconds=result.stall_seconds,
        )
        self._notices.run(lambda: self._send(notice))

    def _send(self, notice: CaptureNotice) -> None:
        """In a thread of its own: a sidecar that hangs delays no save."""
        assert self._notify is not None
        try:
            self._notify(notice)
        except Exception:  # the sidecar looks by itself: a lost notice costs a second
            logger.debug("notice of step %d was not heard", notice.step, exc_info=True)

    # --- words of the control block ------------------------------------------------------------

    def _want_replan(self, wanted: bool) -> None:
        self._tell(Word.REPLAN_WANTED, int(wanted))

    def _stalled(self, result: SaveResult, seconds: float) -> None:
        result.stall_seconds += seconds
        self._add(Word.STALL_NS, int(seconds * 1e9))

    def _tell(self, word: Word, value: int) -> None:
        if self._control is not None:
            self._control[word] = value

    def _add(self, word: Word, value: int) -> None:
        if self._control is not None:
            self._control[word] += value

    def _told(self, word: Word) -> int:
        return self._control[word] if self._control is not None else 0

    # --- the end -------------------------------------------------------------------------------

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Finish the save under way, bounded, and let go of hook, thread and mappings."""
        if self._gone:
            return
        self._settle(timeout)
        self._hook.remove()
        self._thread.stop(timeout)
        self._notices.stop(min(timeout, LAST_NOTICE_SECONDS))
        self._gone = True
        self._slots.close()
        self._planner.current = self._checked = None
        _engines.discard(self)

    def _forget_in_child(self) -> None:
        """A forked data-loader worker: the threads are not here, and the slots are not its."""
        self._gone = True
        self._job = None


_engines: weakref.WeakSet[CaptureEngine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        engine._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _uses_cuda(structure: Structure) -> bool:
    return any(tensor.local.is_cuda for tensor in structure.tensors)


def _gradients_now(division: Division) -> list[Copy]:
    """Those that are there; the place of an absent one is cleared."""
    copies = []
    for tensor, place in division.gradients:
        gradient = tensor.now()
        if gradient is None:
            place.zero_()
        else:
            copies.append(Copy(place, gradient))
    return copies


def _as_it_is_now(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's JSON, copied."""
    try:
        return dict(json.loads(json.dumps(dict(metadata or {}), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise Skip(f"its metadata is not plain JSON: {error}") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
