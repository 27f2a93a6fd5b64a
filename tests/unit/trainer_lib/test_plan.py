"""Owners and names from one digest per rank, without processes: each rank's plan in turn."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from backstay import plan as planning
from backstay.digest import RunningDigest
from backstay.gathering import GatherFailed
from backstay.plan import NOTHING, Plan, estimated_bytes, local_plan, make_plan
from backstay.structure import Kind, Structure, walk


def replicas(rank: int, world_size: int, *, seed: int = 0, group: Any = None) -> Structure:
    """A state of one of several ranks, as if under DDP over `group`."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    own = torch.full((4,), float(rank))
    entries = {"model": model, "own": own}
    structure = walk(entries, rank=rank, world_size=world_size, replicated=["model"])
    if group is not None:
        structure.tensors = tuple(
            replace(t, group=group if t.group else ()) for t in structure.tensors
        )
    return structure


def plans(structures: list[Structure]) -> list[Plan]:
    """What each rank would plan: gather what all give, then plan with it."""
    world_size = len(structures)
    given: list[bytes] = []
    for rank, structure in enumerate(structures):

        def give(data: bytes) -> list[bytes]:
            given.append(data)
            return [data] * world_size

        make_plan(structure, rank, world_size, give)
    return [make_plan(s, rank, world_size, lambda _: given) for rank, s in enumerate(structures)]


def names(plan: Plan) -> set[str]:
    return {piece.name for piece in plan.pieces}


def test_every_replicated_piece_has_one_owner_and_bytes_are_spread() -> None:
    structures = [replicas(rank, 3) for rank in range(3)]
    made = plans(structures)
    parameters = [t.name for t in structures[0].tensors if t.kind is Kind.PARAMETER]
    for name in parameters:
        assert sum(name in names(plan) for plan in made) == 1
    assert all(any(n in names(plan) for n in parameters) for plan in made)
    assert len({plan.id for plan in made}) == 1
    assert not any(plan.doubts for plan in made)


def test_buffers_are_the_first_ranks_and_each_others_own() -> None:
    made = plans([replicas(rank, 2) for rank in range(2)])
    assert "model.1.running_mean" in names(made[0])
    assert "model.1.running_mean" not in names(made[1])
    assert "__backstay__.rank.1.model.1.running_mean" in names(made[1])


def test_what_is_not_known_to_be_a_replica_is_kept_by_each_rank() -> None:
    made = plans([replicas(rank, 2) for rank in range(2)])
    assert [f"__backstay__.rank.{r}.own" in names(plan) for r, plan in enumerate(made)] == [
        True
    ] * 2


def test_replicas_that_differ_are_kept_by_each_rank_with_a_doubt() -> None:
    made = plans([replicas(0, 2, seed=0), replicas(1, 2, seed=1)])
    for rank, plan in enumerate(made):
        assert f"__backstay__.rank.{rank}.model.0.weight" in names(plan)
        assert "model.0.weight" not in names(plan)
        assert "each rank keeps its own copy" in plan.doubts[0]


def test_one_odd_group_leaves_the_others_alone() -> None:
    structures = [
        replicas(0, 4, group=(0, 1)),
        replicas(1, 4, group=(0, 1)),
        replicas(2, 4, group=(2, 3)),
        replicas(3, 4, group=(2, 3), seed=5),
    ]
    made = plans(structures)
    assert not made[0].doubts
    assert made[3].doubts
    assert len({plan.id for plan in made}) == 1


def test_a_rank_that_could_not_plan_agrees_with_nobody() -> None:
    structure = replicas(0, 2)
    plan = make_plan(structure, 0, 2, lambda mine: [mine, NOTHING])
    assert "__backstay__.rank.0.model.0.weight" in names(plan)


def test_any_change_anywhere_changes_the_id() -> None:
    same = [plans([replicas(r, 2) for r in range(2)])[0].id for _ in range(2)]
    other = plans([replicas(0, 2), replicas(1, 2, seed=3)])[0].id
    assert same[0] == same[1] != other


def test_alone_everything_has_its_plain_name() -> None:
    structure = replicas(0, 1)
    assert names(make_plan(structure, 0, 1)) == {t.name for t in structure.tensors}


def test_a_plan_without_the_others_holds_everything() -> None:
    structure = replicas(1, 2)
    for plan in (local_plan(structure, 1, 2), make_plan(structure, 1, 2)):
        assert plan.id == "local"
        assert len(plan.pieces) == len(structure.tensors)
        assert "model.0.weight" in names(plan)
        assert "__backstay__.rank.1.own" in names(plan)


def test_the_estimate_shares_replicas() -> None:
    alone, shared = replicas(0, 1), replicas(0, 2)
    assert estimated_bytes(shared) < estimated_bytes(alone)


def test_a_world_that_gathers_too_little_is_an_error() -> None:
    with pytest.raises(GatherFailed, match="world of 2"):
        make_plan(replicas(0, 2), 0, 2, lambda mine: [mine])


def test_a_gather_in_which_this_rank_said_something_else_is_no_plan() -> None:
    """Its share would follow from what it no longer holds, and tensors would be missing."""
    with pytest.raises(GatherFailed, match="not of this world"):
        make_plan(replicas(0, 2), 0, 2, lambda mine: [bytes(len(mine)), mine])


def test_a_parameter_that_became_a_buffer_is_planned_anew() -> None:
    """Each rank writes its own buffers; what the plan gave to another rank would be missing."""
    module = nn.Linear(2, 2, bias=False)
    before = walk({"model": module}, rank=0, world_size=2)
    made = make_plan(before, 0, 2, lambda mine: [mine, mine])
    value = module.weight.detach()
    del module.weight
    module.register_buffer("weight", value)
    after = walk({"model": module}, rank=0, world_size=2)
    assert planning.carried_over(made, before, after) is None


def test_a_rank_without_memory_to_compare_values_still_joins_the_gather(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(planning, "_add_values", fail)
    given: list[bytes] = []

    def give(data: bytes) -> list[bytes]:
        given.append(data)
        return [data, data]

    with pytest.raises(torch.OutOfMemoryError):
        make_plan(replicas(0, 2), 0, 2, give)
    assert given == [NOTHING]


@pytest.mark.parametrize("shape", [(7, 5, 3), (3, 64), (2, 1), (64,)])
def test_values_are_compared_in_pieces_however_they_are_laid_out(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "STAGING_BYTES", 64)
    made: list[int] = []
    contiguous = torch.Tensor.contiguous

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            made.append(tensor.nbytes)
        return contiguous(tensor)

    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    spread = torch.empty(*shape, 2)[..., 0].copy_(values)
    monkeypatch.setattr(torch.Tensor, "contiguous", watched)
    digests = []
    for tensor in (values, spread):
        running = RunningDigest()
        planning._add_values(running, tensor)
        digests.append(running.digest())
    assert digests[0] == digests[1]
    assert max(made) <= 64
