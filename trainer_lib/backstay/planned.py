"""The plan that is in force on one rank, with its layout and the places of its pieces in each slot.

Called by capture, once a save. It decides when to plan: with all ranks at the first save of an
attempt and when told to; never otherwise, since the others would not come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch

from backstay import plan
from backstay.copying import Batch, Copy, batches
from backstay.gathering import Gather, GatherFailed
from backstay.objects import Encoded
from backstay.savejob import Watched
from backstay.shardfile import Frame, HeaderFull, Item, Layout
from backstay.slotmap import Mapping, Slot
from backstay.structure import Kind, NamedTensor, Structure
from backstay_protocol.clock import Clock
from backstay_protocol.names import rank_name

ASK_AGAIN_SECONDS = 60.0
"""After a plan to which not all ranks came, before another is asked for; doubled each time."""
MOST_ASK_AGAIN_SECONDS = 3600.0

logger = logging.getLogger("backstay")


@dataclass(frozen=True, eq=False)
class Division:
    """What is copied early into one slot, what late."""

    mapping: Mapping
    late_when: tuple[Hashable, ...]
    early: tuple[Batch, ...]
    late: tuple[Batch, ...]
    watched: Watched
    gradients: list[tuple[NamedTensor, torch.Tensor]]
    """With their places; another tensor after each backward, or none."""


@dataclass(eq=False)
class Planned:
    """A structure with its plan and layout, and where each slot has its pieces."""

    structure: Structure
    plan: plan.Plan
    layout: Layout
    taken: frozenset[str]
    """Names that tensors inside values must not use."""
    left_alone: bool
    """The structure changed here only, or not all ranks came to plan: all have to plan anew."""
    on_cuda: bool
    """Whether any of it is on a GPU."""
    divisions: dict[int, Division] = field(default_factory=dict)
    """The last one in each slot: a save makes no views and sorts nothing."""

    def divide(
        self,
        slot: Slot,
        mapping: Mapping,
        late_when: tuple[Hashable, ...],
        is_late: Callable[[NamedTensor], bool],
    ) -> Division:
        """Early and late copies into a slot. `late_when`: the answers of `is_late` hang on it."""
        known = self.divisions.get(slot.index)
        if known is None or known.mapping is not mapping or known.late_when != late_when:
            known = self._divide(mapping, late_when, is_late)
            self.divisions[slot.index] = known
        return known

    def _divide(
        self,
        mapping: Mapping,
        late_when: tuple[Hashable, ...],
        is_late: Callable[[NamedTensor], bool],
    ) -> Division:
        early: list[Copy] = []
        late: list[Copy] = []
        watched, gradients = [], []
        for piece, start in zip(self.plan.pieces, self.layout.starts, strict=True):
            tensor = piece.tensor
            place = mapping.view(start, tensor.local.dtype, tuple(tensor.local.shape))
            if tensor.kind is Kind.GRADIENT:
                gradients.append((tensor, place))
            elif is_late(tensor):
                late.append(Copy(place, tensor.local))
                watched.append(tensor)
            else:
                early.append(Copy(place, tensor.local))
        return Division(
            mapping, late_when, batches(early), batches(late), Watched(watched), gradients
        )


class Planner:
    """Keeps the plan of one rank."""

    def __init__(
        self,
        take_apart: Callable[[], Structure],
        gather: Callable[[str], Gather | None],
        rank: int,
        world_size: int,
        replan_wanted: Callable[[bool], None],
        clock: Clock,
    ) -> None:
        """`take_apart` walks the entries. `gather` makes the gather of a name. `replan_wanted`
        tells the leader, or takes it back.
        """
        self._take_apart = take_apart
        self._gather = gather
        self._rank, self._world_size = rank, world_size
        self._replan_wanted = replan_wanted
        self._clock = clock
        self._ask_at = 0.0
        self._ask_again_seconds = ASK_AGAIN_SECONDS
        self._began = False
        self.current: Planned | None = None

    def for_save(self, name: str, replan: bool) -> Planned:
        """The plan for a save now. Collective in the first save and with `replan`, else local.

        `name`: of the save, the same on all ranks. Raises UnsupportedValue when the entries can't
        be taken apart any more.
        """
        current = self.current
        if replan or not self._began:
            return self._with_all_ranks(name)
        if current is not None and current.structure.unchanged():
            if current.left_alone:
                self._ask_for_replan()
            return current
        if self._world_size == 1 and current is None:
            return self._with_all_ranks(name)
        self.current = None
        structure = self._take_apart()
        if current is not None:
            same = plan.carried_over(current.plan, current.structure, structure)
            if same is not None:
                self.current = self._lay_out(structure, same, left_alone=current.left_alone)
                return self.current
        return self._alone(structure)

    def _with_all_ranks(self, name: str) -> Planned:
        """Take part in the gather whatever is wrong here: the other ranks are waiting in it."""
        self._began, self.current = True, None
        gather = self._gather(name) if self._world_size > 1 else None
        try:
            structure = self._take_apart()
        except BaseException:
            if gather is not None:
                plan.give_nothing(gather)
            raise
        try:
            made = plan.make_plan(structure, self._rank, self._world_size, gather)
        except GatherFailed as error:
            return self._others_missing(structure, error)
        self._ask_at, self._ask_again_seconds = 0.0, ASK_AGAIN_SECONDS
        for doubt in made.doubts:
            logger.warning("%s", doubt)
        self._replan_wanted(False)
        self.current = self._lay_out(structure, made, left_alone=False)
        return self.current

    def _others_missing(self, structure: Structure, error: GatherFailed) -> Planned:
        """Not all ranks came. Each waited in vain for a minute: not at once again."""
        logger.warning(
            "not all ranks came to plan their saves together (%s); until they do, rank %d saves "
            "everything that it holds, if that fits into its slots",
            error,
            self._rank,
        )
        self._replan_wanted(False)
        self._ask_at = self._clock.monotonic() + self._ask_again_seconds
        self._ask_again_seconds = min(2 * self._ask_again_seconds, MOST_ASK_AGAIN_SECONDS)
        made = plan.local_plan(structure, self._rank, self._world_size)
        self.current = self._lay_out(structure, made, left_alone=True)
        return self.current

    def _ask_for_replan(self) -> None:
        if self._clock.monotonic() >= self._ask_at:
            self._replan_wanted(True)

    def _alone(self, structure: Structure) -> Planned:
        """Only here the structure changed. Save all that it holds, until all ranks plan anew."""
        gather_is_possible = self._world_size > 1 and self._gather("") is not None
        if gather_is_possible:
            self._ask_for_replan()
            logger.warning(
                "rank %d has other tensors than at the last plan; until all ranks plan anew it "
                "saves everything that it holds, if that fits into its slots",
                self._rank,
            )
        made = plan.local_plan(structure, self._rank, self._world_size)
        self.current = self._lay_out(structure, made, left_alone=gather_is_possible)
        return self.current

    def _lay_out(self, structure: Structure, made: plan.Plan, *, left_alone: bool) -> Planned:
        layout = Layout(made.items, self._rank, aliases=structure.aliases)
        taken = {tensor.name for tensor in structure.tensors} | set(structure.aliases)
        on_cuda = any(tensor.local.is_cuda for tensor in structure.tensors)
        return Planned(structure, made, layout, frozenset(taken), left_alone, on_cuda)

    def frame(self, current: Planned, encoded: Encoded) -> tuple[Planned, list[Item], Frame]:
        """Header and places of one save; a new layout where the header does not suffice."""
        extras = [
            Item(self._own(name), tensor.dtype, tuple(tensor.shape), (0,) * tensor.ndim)
            for name, tensor in encoded.tensors
        ]
        try:
            return current, extras, current.layout.frame(extras, len(encoded.json))
        except HeaderFull:
            aliases = current.structure.aliases
            layout = Layout(current.plan.items, self._rank, extras=extras, aliases=aliases)
            self.current = replace(current, layout=layout, divisions={})
            return self.current, extras, layout.frame(extras, len(encoded.json))

    def _own(self, name: str) -> str:
        return name if self._world_size == 1 else rank_name(self._rank, name)
