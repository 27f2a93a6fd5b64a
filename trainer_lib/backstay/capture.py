"""The capture engine: brings the state of one moment into a slot while training goes on.

One save: plan (or see that the plan still holds) -> encode the values -> choose and withdraw a slot ->
copy the *early* set -> return; the copy thread copies the *late* set while the next forward and
backward run, writes header and objects and publishes the manifest. Before any optimizer changes a late
tensor a global pre-hook waits for the copy (DESIGN section 3, CAPTURE.md section 3).

Late are only parameters and optimizer state of optimizers whose pre-hook is known to fire. A late
tensor whose version moved all the same means: nothing is published, a warning names it, and it is
early from then on.

Called by the Checkpointer. Once training has begun nothing here raises into it: trouble is logged, told
to the sidecar and stands in the result. It never talks to other ranks except to plan, at the first save
and when told to (`replan`).
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from backstay import objects, plan, rng
from backstay.copying import Copy, Streams, Transfer
from backstay.errors import UnsupportedValue
from backstay.shardfile import Frame, HeaderFull, Item, Layout
from backstay.slotchoice import Chain, Choice, SlotContent, Word, choose_slot
from backstay.slotmap import Mapping as SlotMapping
from backstay.slotmap import Slot, SlotMap
from backstay.structure import Kind, NamedTensor, Structure, walk
from backstay_protocol import slots as protocol
from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.control import ControlBlock
from backstay_protocol.control import Word as ControlWord
from backstay_protocol.errors import BackstayError
from backstay_protocol.faults import fault
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.manifest import SCHEDULE, Manifest
from backstay_protocol.messages import CaptureNotice
from backstay_protocol.names import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_SLOTS,
    PLAN_LOCAL,
    RESERVED,
    rank_name,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

logger = logging.getLogger("backstay")

RNG_KEY = f"{RESERVED}rng"
ABSENT_GRADIENTS_KEY = f"{RESERVED}absent_gradients"
SLOT_SPARE_BYTES = 1 << 20
POLL_SECONDS = 0.002
JUDGED_IN_THE_TRAINING_THREAD = 2


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How long a save may hold up training, at most, before it is given up."""

    word_seconds: float = 1.0
    """For the word that all ranks published the newest step, before it is overwritten."""
    slot_seconds: float = 5.0
    """For a slot that may be withdrawn and that no reader holds."""
    reserve_seconds: float = 60.0
    """For slots that are still being made, or must grow."""
    copy_seconds: float = 300.0
    """For the copy of an earlier save."""


@dataclass(eq=False)
class SaveResult:
    """One save. `done` is set when it was published or given up."""

    step: int
    attempt: int
    done: threading.Event = field(default_factory=threading.Event)
    published: bool = False
    why: str = ""
    """If it was not published: a sentence."""
    slot: int = -1
    stall_seconds: float = 0.0
    """For how long training was held up, so far."""

    def result(self, timeout: float | None = None) -> bool:
        """Wait, bounded, and say whether it was published."""
        self.done.wait(timeout)
        return self.published


class _Skip(Exception):
    """This save is given up; the text says why."""


@dataclass(eq=False)
class _Active:
    """A structure with its plan and layout, and where each slot has its pieces."""

    structure: Structure
    plan: plan.Plan
    layout: Layout
    taken: frozenset[str]
    views: dict[int, tuple[SlotMapping, list[torch.Tensor]]] = field(default_factory=dict)

    def views_in(self, slot: Slot, mapping: SlotMapping) -> list[torch.Tensor]:
        """The pieces' places in a slot; made once for each mapping."""
        known = self.views.get(slot.index)
        if known is None or known[0] is not mapping:
            places = zip(self.layout.items, self.layout.starts, strict=True)
            made = [mapping.view(start, item.dtype, item.shape) for item, start in places]
            self.views[slot.index] = known = (mapping, made)
        return known[1]


@dataclass(eq=False)
class _Job:
    """What the copy thread does for one save."""

    result: SaveResult
    transfer: Transfer
    mapping: SlotMapping
    frame: Frame
    blob: bytes
    manifest: Callable[[], Manifest]
    watched: list[tuple[NamedTensor, tuple[int, ...]]]
    """Late tensors and the versions that they had at the save."""
    training_judges: bool
    """Only the training thread may compare the versions: it is in no kernel then, whose effect on a
    counter would still be to come."""
    moved: list[str] = field(default_factory=list)
    abandoned: bool = False
    judged: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self) -> None:
        """Compare the versions, once: when all is copied, before an optimizer moves them."""
        with self._lock:
            if not self.judged.is_set():
                self.moved = [t.name for t, versions in self.watched if _versions(t) != versions]
                self.judged.set()


class CaptureEngine:
    """Saves of one rank. Thread-safe only in that the hooks may fire in any thread."""

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
        gather: Callable[[], plan.Gather | None] = plan.process_group_gather,
        bounds: Bounds | None = None,
        notify: Callable[[CaptureNotice], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Attach: no slot is made before `check` or `prepare`.

        `gather` is asked at each plan for a way to reach all ranks. `notify` is called in the copy
        thread for each save, published or not. `replicated`: entries whose plain tensors the user
        declares equal on all ranks.
        """
        self._entries = entries
        self._memory = memory
        self._run = run
        self._rank, self._world_size, self._replica = rank, world_size, replica
        self._control = control
        self._num_slots = num_slots
        self._gradients, self._overlap = gradients, overlap
        self._replicated = tuple(replicated)
        self._chunk_size = chunk_size
        self._gather = gather
        self._bounds = bounds or Bounds()
        self._notify = notify
        self._clock = clock
        self._slots = SlotMap(memory, rank, num_slots, clock=clock)
        self._contents = {slot.index: self._content_left_in(slot) for slot in self._slots.slots}
        self._active: _Active | None = None
        self._planned = False
        self._early_names: set[str] = set()
        self._streams = Streams()
        self._job: _Job | None = None
        self._num_overlapped = 0
        self._fires: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._fires_at_save: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._graphed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._no_word_at = -1
        self._patient = True
        self._mentioned = ""
        self._thread = _CopyThread()
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
        structure = self._walk()
        encoded = objects.encode(self._values(structure))
        self._reserve(structure, len(encoded.json))
        return structure

    def prepare(self) -> None:
        """Make the slots for what the entries hold now. Cheap to repeat; never raises."""
        try:
            structure = self._active.structure if self._active else self._walk()
            self._reserve(structure, 0)
        except Exception:
            logger.debug("slots could not be prepared", exc_info=True)

    def _walk(self) -> Structure:
        return walk(
            self._entries,
            gradients=self._gradients,
            rank=self._rank,
            world_size=self._world_size,
            replicated=self._replicated,
        )

    def _reserve(self, structure: Structure, blob_bytes: int) -> None:
        tensors = plan.estimated_bytes(structure)
        names = sum(len(t.name) for t in structure.tensors)
        header = 200 * len(structure.tensors) + 3 * names
        size = tensors + header + 2 * blob_bytes + SLOT_SPARE_BYTES
        self._slots.reserve(size, register=_uses_cuda(structure))

    # --- a save --------------------------------------------------------------------------------

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
        `replan`: all ranks plan anew in this save (collective). The first save always plans.
        """
        result = SaveResult(step, attempt)
        if self._gone:
            return _gone(result)
        begun = self._clock.monotonic()
        overlap = self._overlap if overlap is None else overlap
        try:
            self._begin(result, chain, reason, metadata, replan, overlap)
            if not overlap:
                self._settle(self._bounds.copy_seconds)
        except (_Skip, UnsupportedValue) as skip:
            self._give_up(result, str(skip))
        except Exception as error:
            logger.exception("save of step %d failed", step)
            self._give_up(result, f"{type(error).__name__}: {error}")
        self._stalled(result, self._clock.monotonic() - begun)
        return result

    def _begin(
        self,
        result: SaveResult,
        chain: Chain,
        reason: str,
        metadata: Mapping[str, Any] | None,
        replan: bool,
        overlap: bool,
    ) -> None:
        settled = self._settle(self._bounds.copy_seconds)
        active = self._plan(replan)  # collective, perhaps: before anything that may give up
        details = _frozen(metadata)
        if not settled:
            raise _Skip("the copy of an earlier save is still under way")
        self._slots.drop_retired()
        sources = {p.tensor.name: p.tensor.now() for p in active.plan.pieces}
        absent = [name for name, tensor in sources.items() if tensor is None]
        encoded = objects.encode(self._values(active.structure, absent), active.taken)
        active, extras, frame = self._frame(active, encoded)
        slot, mapping = self._acquire(frame.size, active, result.attempt, chain)
        result.slot = slot.index
        copies = zip(active.plan.pieces, active.views_in(slot, mapping), strict=True)
        early, late, watched = self._divide(active, list(copies), sources, overlap)
        early += [
            Copy(mapping.view(start, item.dtype, item.shape), tensor)
            for item, start, (_, tensor) in zip(extras, frame.starts, encoded.tensors, strict=True)
        ]
        transfer = Transfer(self._streams, early, late)
        transfer.start()
        on_probation = bool(late) and self._num_overlapped < JUDGED_IN_THE_TRAINING_THREAD
        self._num_overlapped += bool(late)
        job = _Job(
            result=result,
            transfer=transfer,
            mapping=mapping,
            frame=frame,
            blob=encoded.json,
            manifest=lambda: self._manifest(result, active, frame.size, chain, reason, details),
            watched=watched,
            training_judges=on_probation,
        )
        self._job = job
        self._thread.run(lambda: self._carry_out(job))

    def _values(self, structure: Structure, absent: Collection[str] = ()) -> dict[str, Any]:
        values = {**structure.objects(), RNG_KEY: rng.capture()}
        if self._gradients:
            values[ABSENT_GRADIENTS_KEY] = list(absent)
        return values

    def _manifest(
        self,
        result: SaveResult,
        active: _Active,
        size: int,
        chain: Chain,
        reason: str,
        metadata: dict[str, Any],
    ) -> Manifest:
        return Manifest(
            run=self._run,
            step=result.step,
            attempt=result.attempt,
            rank=self._rank,
            world_size=self._world_size,
            replica=self._replica,
            plan=active.plan.id,
            size=size,
            created=self._clock.time(),
            chain=tuple(chain),
            chunk_size=self._chunk_size,
            reason=reason,
            metadata=metadata,
        )

    # --- the plan ------------------------------------------------------------------------------

    def _plan(self, replan: bool) -> _Active:
        """The plan in force. Plans with all ranks only when all ranks do."""
        active = self._active
        if replan or not self._planned:
            return self._plan_together()
        if active is not None and active.structure.unchanged():
            return active
        if self._world_size == 1:
            return self._plan_together()
        self._active = None
        structure = self._walk()
        self._tell(ControlWord.REPLAN_WANTED, 1)
        logger.warning(
            "the training state has other tensors than at the last plan (rank %d); until all ranks "
            "plan anew this rank saves everything that it holds, if that fits",
            self._rank,
        )
        return self._activate(structure, plan.local_plan(structure, self._rank, self._world_size))

    def _plan_together(self) -> _Active:
        """Take part in the gather whatever is wrong here: the other ranks are waiting in it."""
        self._planned, self._active = True, None
        gather = self._gather() if self._world_size > 1 else None
        try:
            structure = self._walk()
        except BaseException:
            if gather is not None:
                gather(plan.NOTHING)
            raise
        made = plan.make_plan(structure, self._rank, self._world_size, gather)
        for doubt in made.doubts:
            logger.warning("%s", doubt)
        self._tell(ControlWord.REPLAN_WANTED, 0)
        return self._activate(structure, made)

    def _activate(self, structure: Structure, made: plan.Plan) -> _Active:
        self._active = self._laid_out(structure, made, ())
        return self._active

    def _laid_out(self, structure: Structure, made: plan.Plan, extras: tuple[Item, ...]) -> _Active:
        layout = Layout(made.items, self._rank, extras=extras, aliases=structure.aliases)
        taken = {t.name for t in structure.tensors} | set(structure.aliases)
        return _Active(structure, made, layout, frozenset(taken))

    def _frame(
        self, active: _Active, encoded: objects.Encoded
    ) -> tuple[_Active, tuple[Item, ...], Frame]:
        """Header and places of one save; a new layout where the header does not suffice."""
        extras = tuple(
            Item(self._own(name), tensor.dtype, tuple(tensor.shape), (0,) * tensor.ndim)
            for name, tensor in encoded.tensors
        )
        try:
            return active, extras, active.layout.frame(extras, len(encoded.json))
        except HeaderFull:
            active = self._laid_out(active.structure, active.plan, extras)
            self._active = active
            return active, extras, active.layout.frame(extras, len(encoded.json))

    def _own(self, name: str) -> str:
        return name if self._world_size == 1 else rank_name(self._rank, name)

    # --- the slot ------------------------------------------------------------------------------

    def _content_left_in(self, slot: Slot) -> CheckpointId | None:
        try:
            manifest = protocol.peek(self._memory, self._rank, slot.index)
        except (OSError, BackstayError):
            return None  # not a manifest: nothing that anybody could restore
        return manifest.checkpoint if manifest else None

    def _content_of(self, slot: Slot) -> CheckpointId | None:
        """What it holds: as published, unless the sidecar has struck it out since."""
        content = self._contents[slot.index]
        path = self._memory.slot_manifest(self._rank, slot.index)
        return content if content is not None and os.path.exists(path) else None

    def _acquire(
        self, size: int, active: _Active, attempt: int, chain: Chain
    ) -> tuple[Slot, SlotMapping]:
        """A withdrawn slot that holds `size` bytes. Raises _Skip when there is none in time."""
        changed_here = active.plan.id == PLAN_LOCAL and self._gather_is_possible()
        if changed_here and all(slot.capacity < size for slot in self._slots.slots):
            raise _Skip(
                f"all that this rank holds ({size} bytes) does not fit into its slots; saves go on "
                "when all ranks have planned anew"
            )
        if any(slot.capacity < size for slot in self._slots.slots):
            spare = SLOT_SPARE_BYTES + size // 64
            self._slots.reserve(size + spare, register=_uses_cuda(active.structure))
        if not self._slots.wait_for(size, self._bounds.reserve_seconds):
            raise _Skip(self._slots.trouble or "its slots are still being made")
        self._mention(self._slots.trouble)
        slot = self._withdraw(size, attempt, chain)
        mapping = slot.mapping
        assert mapping is not None
        return slot, mapping

    def _mention(self, trouble: str) -> None:
        """Once each."""
        if trouble and trouble != self._mentioned:
            logger.warning("%s", trouble)
        self._mentioned = trouble or self._mentioned

    def _gather_is_possible(self) -> bool:
        return self._world_size > 1 and self._gather() is not None

    def _withdraw(self, size: int, attempt: int, chain: Chain) -> Slot:
        begun, pause = self._clock.monotonic(), POLL_SECONDS
        while True:
            waited = self._clock.monotonic() - begun
            choice = self._choose(size, attempt, chain)
            candidates = choice.now or (choice.at_last if self._no_word(waited) else ())
            for index in candidates:
                with suppress(protocol.SlotBusy):
                    fault("capture.before_withdraw")
                    protocol.withdraw(self._memory, self._rank, index)
                    fault("capture.after_withdraw")
                    self._contents[index] = None
                    self._patient = True
                    return self._slots.slots[index]
            if waited >= self._bounds.slot_seconds or not self._patient:
                self._patient = False  # no second wait for the same trouble
                raise _Skip(choice.why or "the sidecar is still reading the slot that is next")
            self._clock.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _choose(self, size: int, attempt: int, chain: Chain) -> Choice:
        contents = [
            SlotContent(slot.index, self._content_of(slot), slot.capacity >= size)
            for slot in self._slots.slots
        ]
        complete = self._told(ControlWord.COMPLETE_STEP)
        safe = max(self._told(ControlWord.SAFE_STEP), self._told(ControlWord.DURABLE_STEP))
        only_one = sum(slot.usable for slot in contents) == 1 and not self._slots.busy
        return choose_slot(
            contents,
            attempt=attempt,
            chain=chain,
            word=Word(complete, safe),
            num_slots=1 if only_one else self._num_slots,
        )

    def _no_word(self, waited: float) -> bool:
        """Whether to do without the word. Waited for in vain, it is not waited for again."""
        complete = self._told(ControlWord.COMPLETE_STEP)
        if complete == self._no_word_at or not self._told(ControlWord.SIDECAR_TIME):
            return True
        if waited >= self._bounds.word_seconds:
            self._no_word_at = complete
            return True
        return False

    # --- early or late -------------------------------------------------------------------------

    def _divide(
        self,
        active: _Active,
        copies: list[tuple[plan.Piece, torch.Tensor]],
        sources: Mapping[str, torch.Tensor | None],
        overlap: bool,
    ) -> tuple[list[Copy], list[Copy], list[tuple[NamedTensor, tuple[int, ...]]]]:
        """Early copies, late copies, and the late tensors with the versions they have now."""
        trusted = self._trusted() if overlap else frozenset()
        cuda = _uses_cuda(active.structure)
        early: list[Copy] = []
        late: list[Copy] = []
        watched = []
        for piece, destination in copies:
            tensor, source = piece.tensor, sources[piece.tensor.name]
            if source is None:
                destination.zero_()
                continue
            copy = Copy(destination, source)
            versions = self._versions_if_late(tensor, trusted, cuda)
            if versions is None:
                early.append(copy)
            else:
                late.append(copy)
                watched.append((tensor, versions))
        return early, late, watched

    def _versions_if_late(
        self, tensor: NamedTensor, trusted: Collection[int], cuda: bool
    ) -> tuple[int, ...] | None:
        if tensor.kind not in (Kind.PARAMETER, Kind.OPTIMIZER) or not tensor.optimizers:
            return None
        if not all(id(optimizer) in trusted for optimizer in tensor.optimizers):
            return None
        if tensor.name in self._early_names or tensor.local.device.type not in ("cpu", "cuda"):
            return None
        if cuda and tensor.local.device.type == "cpu":
            return None  # few bytes, and the training stream does not wait for host memory
        return _versions(tensor)

    def _trusted(self) -> frozenset[int]:
        """Optimizers whose hook fired since the last save: not replayed by a CUDA graph."""
        trusted = {
            id(optimizer)
            for optimizer, fires in self._fires.items()
            if fires > self._fires_at_save.get(optimizer, 0) and optimizer not in self._graphed
        }
        for optimizer, fires in self._fires.items():
            self._fires_at_save[optimizer] = fires
        return frozenset(trusted)

    def _before_optimizer_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before any optimizer changes anything: the copy of the late set must be over."""
        self._fires[optimizer] = self._fires.get(optimizer, 0) + 1
        if self._fires[optimizer] == 2 and self._active is None:
            self.prepare()  # its state exists now: the first save will find slots that are ready
        job = self._job
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._graphed.add(optimizer)
        elif job is not None and not job.result.done.is_set():
            begun = self._clock.monotonic()
            self._hold_back(job, self._bounds.copy_seconds)
            self._stalled(job.result, self._clock.monotonic() - begun)

    def _hold_back(self, job: _Job, timeout: float) -> None:
        """Wait for the copy; if that takes too long give the save up rather than training."""
        if not job.transfer.hold_back_training(timeout):
            job.abandoned = True
        job.judge()

    def _settle(self, timeout: float) -> bool:
        """See the save under way to its end, bounded."""
        job = self._job
        if job is None:
            return True
        self._hold_back(job, timeout)
        if job.result.done.wait(timeout):
            self._job = None
            return True
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Return when no copy is under way, before a hand-written update. False: timed out."""
        if self._gone:
            return True
        begun, job = self._clock.monotonic(), self._job
        settled = self._settle(self._bounds.copy_seconds if timeout is None else timeout)
        if job is not None:
            self._stalled(job.result, self._clock.monotonic() - begun)
        return settled

    # --- in the copy thread --------------------------------------------------------------------

    def _carry_out(self, job: _Job) -> None:
        result = job.result
        try:
            job.transfer.run_late(lambda: fault("capture.mid_copy"))
            job.transfer.finish()
            job.mapping.write(0, job.frame.header)
            job.mapping.write(job.frame.blob_start, job.blob)
            for start, length in job.frame.fillers:
                job.mapping.write(start, bytes(length))
            if job.training_judges:
                job.judged.wait()
            else:
                job.judge()
            self._publish(job)
        except Exception as error:
            logger.exception("save of step %d failed", result.step)
            result.why = f"{type(error).__name__}: {error}"
        result.done.set()
        self._report(result)

    def _publish(self, job: _Job) -> None:
        result = job.result
        if job.abandoned:
            result.why = "the copy took too long; training went on without it"
            return
        if job.moved:
            self._early_names.update(job.moved)
            result.why = (
                f"{_some(job.moved)} changed while being copied, before any optimizer's step; "
                "copied at once from now on"
            )
            return
        fault("capture.before_publish")
        protocol.publish(self._memory, self._rank, result.slot, job.manifest())
        self._contents[result.slot] = CheckpointId(result.step, result.attempt)
        result.published = True
        fault("capture.after_publish")
        self._tell(ControlWord.PUBLISHED_STEP, result.step)
        self._tell(ControlWord.PUBLISHED_TIME, int(self._clock.time() * 1e9))

    def _report(self, result: SaveResult) -> None:
        if result.published:
            self._add(ControlWord.SAVES, 1)
        else:
            self._add(ControlWord.SKIPPED, 1)
            logger.warning("step %d was not saved: %s", result.step, result.why)
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
        try:
            self._notify(notice)
        except Exception:
            logger.debug("notice of step %d was not heard", result.step, exc_info=True)

    def _give_up(self, result: SaveResult, why: str) -> None:
        result.why = why
        result.done.set()
        self._thread.run(lambda: self._report(result))

    # --- words ---------------------------------------------------------------------------------

    def _stalled(self, result: SaveResult, seconds: float) -> None:
        result.stall_seconds += seconds
        self._add(ControlWord.STALL_NS, int(seconds * 1e9))

    def _tell(self, word: ControlWord, value: int) -> None:
        if self._control is not None:
            self._control[word] = value

    def _add(self, word: ControlWord, value: int) -> None:
        if self._control is not None:
            self._control[word] += value

    def _told(self, word: ControlWord) -> int:
        return self._control[word] if self._control is not None else 0

    # --- the end -------------------------------------------------------------------------------

    def close(self, timeout: float = 60.0) -> None:
        """Finish the save under way, bounded, and let go of hooks, thread and mappings."""
        if self._gone:
            return
        self._settle(timeout)
        self._hook.remove()
        self._thread.stop(timeout)
        self._gone = True
        self._slots.close()
        self._active = None
        _engines.discard(self)

    def _forget_in_child(self) -> None:
        """A forked data-loader worker: the copy thread is not here, and the slots are not its."""
        self._gone = True
        self._job = None


class _CopyThread:
    """One daemon thread, started with the first task."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="backstay-copy", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def stop(self, timeout: float) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


_engines: weakref.WeakSet[CaptureEngine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in list(_engines):
        engine._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _versions(tensor: NamedTensor) -> tuple[int, ...] | None:
    """Counters that move with every in-place change; None where there are none.

    A DTensor's own counter moves when operations go through it, its local tensor's when they don't.
    """
    try:
        if tensor.is_dtensor:
            return tensor.source._version, tensor.local._version
        return (tensor.source._version,)
    except RuntimeError:  # an inference tensor
        return None


def _uses_cuda(structure: Structure) -> bool:
    return any(tensor.local.is_cuda for tensor in structure.tensors)


def _frozen(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's JSON as it is now."""
    try:
        return dict(json.loads(json.dumps(dict(metadata or {}), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise _Skip(f"its metadata is not plain JSON: {error}") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _gone(result: SaveResult) -> SaveResult:
    result.why = "the checkpointer is closed, or this is a forked child"
    result.done.set()
    return result
