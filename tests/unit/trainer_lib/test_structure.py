"""Taking the user's entries apart: names, kinds, what is noticed later, what is refused."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from backstay.errors import UnsupportedValue
from backstay.structure import Kind, Structure, walk


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.emb(x)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([1, 2, 3])).square().sum().backward()
    optimizer.step()


def names(structure: Structure) -> list[str]:
    return [tensor.name for tensor in structure.tensors]


def test_tensors_are_named_as_dcp_names_them() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    structure = walk({"model": model, "optimizer": optimizer})
    found = {tensor.name: tensor.kind for tensor in structure.tensors}
    assert set(model.state_dict()) == {
        name.removeprefix("model.") for name in found if name.startswith("model.")
    }
    assert found["model.emb.weight"] is Kind.PARAMETER
    assert found["model.norm.running_mean"] is Kind.BUFFER
    assert found["optimizer.state.emb.weight.exp_avg"] is Kind.OPTIMIZER
    assert "model.cache" not in found


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda m: torch.compile(m, backend="eager"), id="torch.compile"),
        pytest.param(nn.DataParallel, id="DataParallel"),
        pytest.param(lambda m: torch.compile(nn.DataParallel(m), backend="eager"), id="both"),
    ],
)
def test_wrappers_leave_no_trace_in_names(wrap: Callable[[nn.Module], Any]) -> None:
    model = Net()
    assert names(walk({"model": wrap(model)})) == names(walk({"model": model}))


def test_an_averaged_model_keeps_its_own_names() -> None:
    ema = AveragedModel(Net())
    assert set(names(walk({"ema": ema}))) == {f"ema.{name}" for name in ema.state_dict()}


def test_a_tied_parameter_is_stored_once_and_its_other_name_noted() -> None:
    model = Net()
    model.head.weight = model.emb.weight
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    structure = walk({"model": model, "optimizer": optimizer})
    assert "model.head.weight" not in names(structure)
    assert structure.aliases == {"model.head.weight": "model.emb.weight"}


def test_parameters_of_several_modules_in_one_optimizer_are_told_apart() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    (first(torch.ones(2)) + second(torch.ones(2))).sum().backward()
    optimizer.step()
    found = names(walk({"a": first, "b": second, "optimizer": optimizer}))
    assert "optimizer.state.a.weight.exp_avg" in found
    assert "optimizer.state.b.weight.exp_avg" in found


def test_several_optimizers_and_containers_of_modules_are_taken_apart() -> None:
    models = {"gen": nn.Linear(2, 2), "disc": nn.Linear(2, 2)}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models.values()]
    structure = walk({"models": models, "optimizers": optimizers, "bag": [torch.ones(2), 7]})
    assert names(structure)[:2] == ["models.gen.weight", "models.gen.bias"]
    assert "bag.0" in names(structure)
    assert structure.objects()["bag.1"] == 7
    group = structure.objects()["optimizers.1"]["param_groups"][0]
    assert (group["params"], group["lr"]) == (["weight", "bias"], 0.5)


def test_values_come_back_into_the_same_objects() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    scheduler = StepLR(optimizer, 2)
    train(model, optimizer)
    entries = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 3}
    saved = walk(entries).objects()
    rate = optimizer.param_groups[0]["lr"]
    saved["optimizer"]["param_groups"][0]["lr"] = torch.tensor(0.25)
    saved["epoch"] = 9
    train(model, optimizer)
    scheduler.step()
    assert walk(entries).load_objects(saved) == ()
    assert entries["epoch"] == 9
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_groups_are_matched_by_their_parameters_not_by_their_place() -> None:
    model = nn.Linear(2, 2)
    there = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}], 0.2)
    here = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], 0.9)
    saved = walk({"model": model, "optimizer": there}).objects()
    walk({"model": model, "optimizer": here}).load_objects(saved)
    assert [group["lr"] for group in here.param_groups] == [0.2, 0.1]


def test_other_groups_than_the_saved_ones_are_an_error_that_names_them() -> None:
    model = nn.Linear(2, 2)
    one = torch.optim.SGD(model.parameters(), 0.1)
    two = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], 0.1)
    saved = walk({"model": model, "optimizer": one}).objects()
    with pytest.raises(UnsupportedValue, match=r"optimizer: no saved param group .*weight"):
        walk({"model": model, "optimizer": two}).load_objects(saved)


def test_extra_state_of_a_module_is_a_value() -> None:
    class Scaled(nn.Linear):
        scale = 1

        def get_extra_state(self) -> int:
            return self.scale

        def set_extra_state(self, state: int) -> None:
            self.scale = state

    model = nn.Sequential(Scaled(2, 2))
    structure = walk({"model": model})
    assert structure.objects() == {"model.0._extra_state": 1}
    structure.load_objects({"model.0._extra_state": 5})
    assert model[0].scale == 5


def test_every_name_is_known_whatever_lies_elsewhere() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    structure = walk({"model": model}, gradients=True)
    assert structure.names == {
        "model.a.weight",
        "model.b.weight",
        "__backstay__.grad.model.a.weight",
    }


def test_gradients_are_tensors_only_on_request_and_may_be_absent() -> None:
    model = nn.Linear(2, 2)
    assert len(walk({"model": model}).tensors) == 2
    gradients = [
        t for t in walk({"model": model}, gradients=True).tensors if t.kind is Kind.GRADIENT
    ]
    assert [t.name for t in gradients] == [
        "__backstay__.grad.model.weight",
        "__backstay__.grad.model.bias",
    ]
    assert gradients[0].now() is None
    model(torch.ones(2)).sum().backward()
    assert gradients[0].now() is model.weight.grad or torch.equal(
        gradients[0].now(), model.weight.grad
    )


def test_nobody_known_trains_a_copy_but_frozen_parameters_go_with_their_module() -> None:
    model, ema = Net(), Net()
    model.emb.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    tensors = {
        t.name: t for t in walk({"model": model, "ema": ema, "optimizer": optimizer}).tensors
    }
    assert tensors["model.emb.weight"].optimizers == (optimizer,)
    assert tensors["model.head.weight"].optimizers == (optimizer,)
    assert tensors["ema.head.weight"].optimizers == ()


def changes() -> Iterator[Any]:
    def replace_parameter(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        model.head.weight = nn.Parameter(torch.zeros(5, 4))

    def other_memory(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        model.head.weight.data = model.head.weight.data.clone()

    def new_buffer(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        model.norm.register_buffer("more", torch.zeros(1))

    def new_module(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        model.more = nn.Linear(1, 1)

    def other_state(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        state = optimizer.state[model.head.weight]
        state["exp_avg"] = state["exp_avg"].clone()

    def more_state(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        optimizer.state[model.head.weight]["more"] = 1

    def loaded_state(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        optimizer.load_state_dict(optimizer.state_dict())

    def new_group(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def new_entry(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        entries["more"] = torch.zeros(1)

    def other_entry(model: Net, optimizer: torch.optim.Optimizer, entries: Any) -> None:
        entries["bag"]["x"] = torch.zeros(2)

    for change in list(locals().values()):
        yield pytest.param(change, id=change.__name__.replace("_", " "))


@pytest.mark.parametrize("change", list(changes()))
def test_the_walk_by_identity_notices(change: Callable[[Any, Any, Any], None]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    entries: dict[str, Any] = {"model": model, "optimizer": optimizer, "bag": {"x": torch.ones(2)}}
    structure = walk(entries)
    change(model, optimizer, entries)
    assert not structure.unchanged()


def test_training_goes_unnoticed() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    entries = {"model": model, "optimizer": optimizer, "epoch": 1}
    structure = walk(entries)
    train(model, optimizer)
    optimizer.zero_grad()
    entries["epoch"] = 2
    assert structure.unchanged()
    assert structure.objects()["epoch"] == 2


class Saves:
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("thing", "way_out"),
    [
        pytest.param(DataLoader([1, 2]), "StatefulDataLoader", id="a plain DataLoader"),
        pytest.param(iter([1]), "can't be resumed", id="an iterator"),
        pytest.param((i for i in [1]), "can't be resumed", id="a generator"),
        pytest.param(Saves(), "no load_state_dict", id="half a Stateful"),
    ],
)
@pytest.mark.parametrize("nested", [False, True], ids=["as an entry", "in a list"])
def test_what_cannot_be_resumed_is_an_error_that_names_the_entry(
    thing: Any, way_out: str, nested: bool
) -> None:
    entries = {"data": [1, thing]} if nested else {"data": thing}
    with pytest.raises(UnsupportedValue, match="data") as caught:
        walk(entries)
    assert way_out in str(caught.value)


class GivesOnly(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"pair": (torch.zeros(2), 3)}, r"^pair\.1: a value of type int in a tuple .* list"),
        ({"a": [(nn.Linear(1, 1), None)]}, r"^a\.0\.1: .*NoneType in a tuple"),
        (MappingProxyType({"epoch": 1}), r"^epoch: .* in a mappingproxy"),
        ({"net": nn.Sequential(GivesOnly(1, 1))}, r"^net\.0 \(GivesOnly\) .*set_extra_state"),
        ({"x": torch.zeros(1).expand(3)}, r"^x: an expanded tensor .*contiguous"),
    ],
    ids=["tuple", "nested", "entries", "extra state", "expanded"],
)
def test_what_can_be_saved_but_not_put_back_is_refused(
    entries: Mapping[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedValue, match=says):
        walk(entries)


def test_tuples_of_values_only_or_of_things_only_are_fine() -> None:
    structure = walk({"betas": (0.9, 0.99), "pair": (torch.zeros(2), nn.Linear(1, 1))})
    assert structure.objects() == {"betas": (0.9, 0.99)}
    assert {"pair.0", "pair.1.weight"} <= structure.names


def test_an_optimizer_over_an_unknown_module_is_an_error_that_says_which_parameter() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1)
    with pytest.raises(UnsupportedValue, match=r"optimizer: parameter 0 of its group 0.*\(2, 3\)"):
        walk({"optimizer": optimizer})


def test_a_bare_parameter_is_a_home_for_an_optimizer() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    found = names(walk({"scale": parameter, "optimizer": optimizer}))
    assert found == ["scale", "optimizer.state.scale.momentum_buffer"]


def test_an_unknown_replicated_entry_is_an_error() -> None:
    with pytest.raises(UnsupportedValue, match="modle"):
        walk({"model": Net()}, replicated=["modle"])


@pytest.mark.parametrize("name", ["", "__backstay__.x", 3])
def test_entry_names_are_checked(name: Any) -> None:
    with pytest.raises(UnsupportedValue, match="entry names"):
        walk({name: 1})
