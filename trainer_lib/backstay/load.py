"""Loads a decided checkpoint straight into the live state of one rank.

Called by the restore round (restore.py), once per decision. Headers first, own shard before others;
then optimizer state is created, every live tensor is matched with saved pieces by byte ranges, and
the chunks that hold them are read, verified and scattered. Live tensors are overwritten before the
last chunk is verified: allowed only because a verdict that is not `go` reloads everything. There
is no second copy of the state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from backstay import rng
from backstay.boxes import Box, intersect, subtract
from backstay.capture import ABSENT_GRADIENTS_KEY, RNG_KEY
from backstay.catalog import Catalog, Saved, describe
from backstay.errors import RestoreFailed, StructureMismatch
from backstay.optimizer_state import create_gradients, create_states, drop_gradients
from backstay.restore import Loaded
from backstay.saved_objects import OnWorldChange, SavedObjects, keep_or_merge
from backstay.scatter import Piece, Targets
from backstay.shard_reader import NoSource, Reach, Shard, in_threads
from backstay.structure import GRADIENT_PREFIX, Kind, NamedTensor, Structure
from backstay_protocol.faults import fault
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import Decision

SHARDS_AT_ONCE = 4
NAMES_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How one rank loads."""

    rank: int
    world_size: int
    reach: Reach
    on_world_change: OnWorldChange = "error"


class Loader:
    """Loads decisions into one live state; more than one if the first prove bad."""

    def __init__(self, walk: Callable[[], Structure], settings: LoadSettings) -> None:
        """`walk` takes the live state apart anew (structure.py)."""
        self._walk = walk
        self._settings = settings
        self._touched = False
        self.notes: list[str] = []
        """What people should know: state that was not restored, on their own wish."""

    def __call__(self, decision: Decision) -> Loaded:
        """Load, or say what was wrong. Never raises: the other ranks must hear of it."""
        self.notes.clear()
        if decision.base is None:
            return self._begin_fresh()
        self._touched = True
        attempt = _Load(self._walk, self._settings, decision, decision.base, self.notes)
        try:
            return attempt.run()
        except NoSource:
            return attempt.failed(None)
        # Anything that goes wrong here ends the restore of all ranks, by the verdict.
        except Exception as error:  # noqa: BLE001
            return attempt.failed(error)

    def _begin_fresh(self) -> Loaded:
        if not self._touched:
            return Loaded()
        return Loaded(
            error=RestoreFailed(
                "the leader decided for a fresh start after a load had begun: the parameters of "
                "this process are overwritten. Start the process again"
            )
        )


class _Load:
    """One decision."""

    def __init__(
        self,
        walk: Callable[[], Structure],
        settings: LoadSettings,
        decision: Decision,
        base: CheckpointId,
        notes: list[str],
    ) -> None:
        self._walk = walk
        self._settings = settings
        self._base = base
        self._notes = notes
        self._saved_world_size = decision.saved_world_size
        self._same_world = decision.saved_world_size == settings.world_size
        self._shards = {s.rank: Shard(s, base, settings.reach) for s in decision.shards}
        self._begun = False

    def run(self) -> Loaded:
        catalog = self._index()
        structure = self._create(catalog)
        objects = SavedObjects(self._shards, self._own_rank)
        saved = {self._own_rank: objects.own()} if self._same_world else objects.by_rank()
        absent = self._absent_gradients(saved, catalog)
        match = _match(structure, catalog, objects, self._settings)
        self._without_gradients(match, structure, catalog, absent)
        match.check(str(self._base), self._saved_world_size, self._settings)
        self._notes += match.left_alone
        values = self._values(structure, saved)
        values[ABSENT_GRADIENTS_KEY] = absent
        self._fill(match.pieces)
        self._put(structure, values)
        return self._loaded()

    def failed(self, error: Exception | None) -> Loaded:
        """`error` None: some shard has no source left, what was bad says the rest."""
        bad = tuple(source for shard in self._shards.values() for source in shard.bad)
        if error is None and not bad:
            error = RestoreFailed(f"the decision for {self._base} names no source for some shard")
        return Loaded(bad=bad if error is None else (), error=error)

    @property
    def _own_rank(self) -> int:
        """The saved rank whose part of the world this rank took over."""
        if self._same_world:
            return self._settings.rank
        return self._settings.rank * self._saved_world_size // self._settings.world_size

    def _index(self) -> Catalog:
        """All headers; the own shard's pieces are preferred, then the nearest ranks'."""
        order = sorted(self._shards.values(), key=lambda s: (abs(s.rank - self._own_rank), s.rank))
        self._each(order, lambda shard: shard.index())
        catalog = Catalog(self._settings.rank, self._saved_world_size, self._same_world)
        for shard in order:
            catalog.add(shard, shard.index())
        return catalog

    def _create(self, catalog: Catalog) -> Structure:
        """The live state with all that the checkpoint has and the script does not make itself."""
        structure = self._walk()
        paths = tuple(f"{entry.path}.state." for entry in structure.optimizers)
        create_states(structure.optimizers, catalog.below(paths))
        create_gradients(structure.gradients, catalog.below((GRADIENT_PREFIX,)))
        return self._walk()

    def _absent_gradients(
        self, saved: Mapping[int, dict[str, Any]], catalog: Catalog
    ) -> tuple[str, ...]:
        """Gradients that were None at the save, on every rank whose bytes this one would take."""
        absent = {rank: values.pop(ABSENT_GRADIENTS_KEY, ()) for rank, values in saved.items()}
        if self._same_world:
            return tuple(absent[self._own_rank])
        named = dict.fromkeys(name for names in absent.values() for name in names)
        return tuple(n for n in named if all(n in absent[r] for r in catalog.holders(n)))

    def _without_gradients(
        self, match: _Match, structure: Structure, catalog: Catalog, absent: Collection[str]
    ) -> None:
        """Gradients that each saved rank kept for itself: nobody can divide them anew."""
        if self._same_world:
            return
        lost = [
            tensor.name
            for tensor in structure.tensors
            if tensor.now() is None  # only what was saved for all has been created
            and tensor.name not in absent
            and catalog.kept_by_ranks(tensor.name)
        ]
        if self._settings.on_world_change == "error":
            match.per_rank += lost
        elif lost:
            match.left_alone.append(
                f"gradients of {len(lost)} parameters ({lost[0].removeprefix(GRADIENT_PREFIX)} "
                "...): kept per rank, dropped"
            )

    def _values(self, structure: Structure, saved: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        if self._same_world:
            return saved[self._own_rank]
        values, left = keep_or_merge(
            saved, structure.entries, self._settings.on_world_change, self._world_change
        )
        self._notes += left
        return values

    @property
    def _world_change(self) -> str:
        return f"{self._saved_world_size} ranks to {self._settings.world_size}"

    def _fill(self, pieces: Mapping[Shard, list[Piece]]) -> None:
        def one_done() -> None:
            if not self._begun:
                self._begun = True
                fault("load.mid")

        def fill(shard: Shard) -> None:
            shard.fill(Targets(pieces[shard], shard.chunk_size), one_done)

        self._each(list(pieces), fill)

    def _each(self, shards: list[Shard], work: Callable[[Shard], object]) -> None:
        """For every shard, some at once; all are tried, so that every bad source is known."""
        lost: list[NoSource] = []

        def guarded(shard: Shard) -> None:
            try:
                work(shard)
            except NoSource as error:
                lost.append(error)

        in_threads(shards, guarded, SHARDS_AT_ONCE)
        if lost:
            raise lost[0]

    def _put(self, structure: Structure, values: dict[str, Any]) -> None:
        states = values.pop(RNG_KEY, None)
        drop_gradients(structure.gradients, values.pop(ABSENT_GRADIENTS_KEY, ()))
        missing = structure.load_objects(values)
        if missing:
            self._notes.append(f"not in the checkpoint, left as they are: {', '.join(missing)}")
        if states is not None:
            self._notes += rng.restore(states)

    def _loaded(self) -> Loaded:
        bytes_by_tier: dict[str, int] = {}
        for shard in self._shards.values():
            for tier, count in shard.bytes_by_tier.items():
                bytes_by_tier[tier] = bytes_by_tier.get(tier, 0) + count
        bad = tuple(source for shard in self._shards.values() for source in shard.bad)
        own = self._shards[self._own_rank]
        return Loaded(
            # A copy that is proven bad is struck out for everyone, though others served here.
            bad=bad if any(source.proven for source in bad) else (),
            bytes_by_tier=bytes_by_tier,
            metadata=own.manifest.metadata,
        )


# --- matching live tensors with saved pieces ------------------------------------------------------


@dataclass
class _Match:
    """What fills what, and what does not fit."""

    pieces: dict[Shard, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    per_rank: list[str] = field(default_factory=list)
    """Kept by each saved rank for itself, and the number of ranks changed."""
    left_alone: list[str] = field(default_factory=list)

    def check(self, checkpoint: str, saved_world_size: int, settings: LoadSettings) -> None:
        """Raise StructureMismatch if anything does not fit, naming all of it."""
        parts = [
            _listed("in the script but not in the checkpoint", self.missing),
            _listed("in the checkpoint but not in the script", self.unexpected),
            _listed("different", self.different),
            _listed(
                f"kept by each of {saved_world_size} ranks for itself, here are "
                f"{settings.world_size} ranks",
                self.per_rank,
            ),
        ]
        found = [part for part in parts if part]
        if not found:
            return
        hint = (
            "Restore with the model, optimizer and entries that were saved, choose another "
            "checkpoint (spec.restore), or begin another run (spec.checkpoint.runName)"
        )
        if self.per_rank:
            hint += (
                ". Tensors that are equal on all ranks have to be known as that to be carried to "
                "another number of ranks: wrap the module in DDP or FSDP, or name its entry in "
                "Checkpointer(replicated=...). Plain tensors, buffers and gradients can be given "
                'up: Checkpointer(on_world_change="reset")'
            )
        raise StructureMismatch(
            f"checkpoint {checkpoint} does not fit the state of this script:\n"
            + "\n".join(f"  {part}" for part in found)
            + f"\n{hint}."
        )


def _match(
    structure: Structure,
    catalog: Catalog,
    objects: SavedObjects,
    settings: LoadSettings,
) -> _Match:
    match = _Match()
    used: set[str] = set()
    for tensor in structure.tensors:
        target = tensor.now()
        if target is None:
            continue
        name, pieces = catalog.find(tensor.name, any_rank=not tensor.per_rank)
        used.add(name)
        if not pieces:
            _not_found(match, tensor, catalog, settings)
        else:
            _fit(match, tensor, target, pieces)
    unused = [name for name in catalog.unused(used) if name not in structure.names]
    keys = structure.objects() if unused else {}
    match.unexpected = [name for name in unused if not objects.owns(name, keys)]
    return match


def _not_found(
    match: _Match, tensor: NamedTensor, catalog: Catalog, settings: LoadSettings
) -> None:
    if not catalog.kept_by_ranks(tensor.name):
        match.missing.append(f"{tensor.name} {tensor.global_shape}")
    elif settings.on_world_change == "reset" and tensor.kind in (Kind.OTHER, Kind.BUFFER):
        match.left_alone.append(f"{tensor.name}: kept per rank, left as the script made it")
    else:
        match.per_rank.append(tensor.name)


def _fit(match: _Match, tensor: NamedTensor, target: torch.Tensor, pieces: list[Saved]) -> None:
    """Cover the live box with saved ones; every byte is read once."""
    if len(pieces) == 1 and _is_whole(pieces[0], tensor, target):
        entry = pieces[0].entry
        match.pieces[pieces[0].shard].append(
            Piece(entry.start, entry.shape, (0,) * target.ndim, target)
        )
        return
    saved = describe(pieces)
    if saved.dtype != target.dtype or saved.shape != tensor.global_shape:
        match.different.append(
            f"{tensor.name}: saved {saved.shape} {_dtype(saved.dtype)}, here "
            f"{tensor.global_shape} {_dtype(target.dtype)}"
        )
        return
    whole = Box(tensor.offsets, tuple(target.shape))
    open_boxes = [whole] if whole.volume else []
    for piece in pieces:
        if not open_boxes:
            return
        left: list[Box] = []
        for box in open_boxes:
            common = intersect(box, piece.box)
            if common is not None:
                match.pieces[piece.shard].append(_piece(piece, common, whole, target))
            left += subtract(box, piece.box)
        open_boxes = left
    if open_boxes:
        match.different.append(f"{tensor.name}: no shard holds {open_boxes[0]} of it")


def _is_whole(saved: Saved, tensor: NamedTensor, target: torch.Tensor) -> bool:
    """The usual case, without any geometry: one piece that is the whole tensor, here and there."""
    entry = saved.entry
    return (
        entry.shape == tensor.global_shape
        and not any(entry.offsets)
        and entry.dtype == target.dtype
        and target.shape == entry.shape
        and target.numel() > 0
    )


def _piece(saved: Saved, common: Box, whole: Box, target: torch.Tensor) -> Piece:
    view = target
    for dim, offset in enumerate(common.within(whole)):
        view = view.narrow(dim, offset, common.lengths[dim])
    return Piece(saved.entry.start, saved.entry.shape, common.within(saved.box), view)


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{what} ({len(names)}): {', '.join(names[:NAMES_SHOWN])}{more}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
