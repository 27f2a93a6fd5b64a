from __future__ import annotations

import pytest
import torch
from torch import nn

from backstay.catalog import Described
from backstay.optimizer_state import create_gradients, create_states, drop_gradients
from backstay.structure import walk


def make(optimizer_type=torch.optim.AdamW, **options):
    model = nn.Linear(4, 3)
    optimizer = optimizer_type(model.parameters(), **options)
    return model, optimizer, walk({"model": model, "optim": optimizer}, gradients=True)


def saved(**shapes) -> dict[str, Described]:
    return {
        f"optim.state.{name.replace('__', '.')}": Described(dtype, shape, 1)
        for name, (shape, dtype) in shapes.items()
    }


WEIGHT = saved(
    weight__exp_avg=((3, 4), torch.bfloat16),
    weight__exp_avg_sq=((3, 4), torch.float32),
    weight__step=((), torch.float32),
)


def test_exactly_the_saved_tensors_are_made_in_torchs_order() -> None:
    model, optimizer, walked = make()

    create_states(walked.optimizers, WEIGHT)

    state = optimizer.state[model.weight]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    assert (state["exp_avg"].dtype, state["exp_avg"].shape) == (torch.bfloat16, (3, 4))
    assert state["step"].shape == ()
    assert model.bias not in optimizer.state


def test_what_is_there_and_fits_stays_what_does_not_is_made_anew() -> None:
    model, optimizer, walked = make()
    kept, other = torch.zeros(3, 4), torch.zeros(3, 4)
    optimizer.state[model.weight] = {"exp_avg_sq": kept, "exp_avg": other}

    create_states(walked.optimizers, WEIGHT)

    assert optimizer.state[model.weight]["exp_avg_sq"] is kept
    assert optimizer.state[model.weight]["exp_avg"] is not other


def test_strides_of_the_parameter_are_kept() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    walked = walk({"model": model, "optim": optimizer})

    create_states(walked.optimizers, saved(weight__momentum_buffer=((4, 3, 2, 2), torch.float32)))

    made = optimizer.state[model.weight]["momentum_buffer"]
    assert made.stride() == model.weight.stride()
    assert not made.requires_grad


def test_a_state_of_another_shape_than_its_parameter_is_made_whole() -> None:
    model, optimizer, walked = make()

    create_states(walked.optimizers, saved(weight__row_var=((3, 1), torch.float32)))

    assert optimizer.state[model.weight]["row_var"].shape == (3, 1)


@pytest.mark.parametrize("present", [True, False], ids=["saved", "not-saved"])
def test_gradients_are_there_exactly_when_they_were_saved(present) -> None:
    model, _, walked = make()
    model.bias.grad = torch.ones(3)
    name = "__backstay__.grad.model.weight"
    described = {name: Described(torch.float32, (3, 4), 1)} if present else {}

    create_gradients(walked.gradients, described)

    assert (model.weight.grad is not None) is present
    assert model.bias.grad is None


def test_gradients_that_were_none_at_the_save_are_none_again() -> None:
    model, _, walked = make()
    model.weight.grad, model.bias.grad = torch.ones(3, 4), torch.ones(3)

    drop_gradients(walked.gradients, ["__backstay__.grad.model.bias"])

    assert model.weight.grad is not None
    assert model.bias.grad is None
