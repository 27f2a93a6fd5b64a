"""Which tensors may be copied late."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from backstay.savejob import Watched
from backstay.structure import NamedTensor, walk
from backstay.trust import Trust


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return optimizer


def late(trust: Trust, model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    structure = walk({"m": model, "copy": nn.Linear(2, 2), "o": optimizer, "t": torch.ones(1)})
    watched = trust.watched()
    return {
        t.name for t in structure.tensors if trust.is_late(t, watched, parameters_on_cuda=False)
    }


def test_only_what_a_watched_optimizer_changes_is_late(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    trust = Trust()
    assert late(trust, model, optimizer) == set(), "never seen to step"
    trust.fired(optimizer, graphed=False)
    names = late(trust, model, optimizer)
    assert {"m.0.weight", "m.1.bias", "o.state.0.weight.momentum_buffer"} <= names
    assert not any(n.startswith(("copy", "t")) or "running" in n for n in names)
    assert late(trust, model, optimizer) == set(), "no step since the last save"


def test_what_is_late_among_all_kinds_of_entries_is_what_the_docs_say() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    trained, untrained = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([model[0].weight, *model[1].parameters(), trained])
    (model(torch.randn(4, 2)).sum() + trained.sum()).backward()
    optimizer.step()
    entries = {
        "model": model,
        "ema": AveragedModel(model),
        "trained": trained,
        "untrained": untrained,
        "optimizer": optimizer,
        "plain": torch.ones(1),
    }
    trust = Trust()
    trust.fired(optimizer, graphed=False)
    watched = trust.watched()
    structure = walk(entries, gradients=True)
    found = {
        t.name for t in structure.tensors if trust.is_late(t, watched, parameters_on_cuda=False)
    }
    parameters = {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias", "trained"}
    assert {name for name in found if not name.startswith("optimizer.")} == parameters
    state = {t.name for t in structure.tensors if t.name.startswith("optimizer.")}
    assert state
    assert state <= found


def test_an_optimizer_in_a_cuda_graph_is_never_watched(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    trust = Trust()
    trust.fired(optimizer, graphed=True)
    trust.fired(optimizer, graphed=False)
    assert late(trust, model, optimizer) == set()


def test_a_tensor_that_moved_is_early_from_then_on(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    trust = Trust()
    trust.lose(["m.0.weight"])
    trust.fired(optimizer, graphed=False)
    names = late(trust, model, optimizer)
    assert "m.0.weight" not in names
    assert "m.0.bias" in names


def test_versions_tell_which_tensor_was_changed() -> None:
    tensors = [torch.zeros(2), torch.zeros(2)]
    structure = walk({"a": tensors[0], "b": tensors[1]})
    named: list[NamedTensor] = list(structure.tensors)
    watched = Watched(named)
    before = watched.versions()
    assert watched.moved_since(before) == []
    tensors[1].add_(1)
    assert watched.moved_since(before) == ["b"]
