"""Makes the optimizer state and gradients that a checkpoint has, to be loaded in place.

Called by load.py, only when there is a checkpoint. Never by a fake step: that would cost three
times the parameters, fire hooks and leave `step` at 1. Nor by load_state_dict, which aliases or
casts. Nothing is filled here; memory comes when the load writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from backstay.catalog import Described
from backstay.errors import StructureMismatch
from backstay.structure import OptimizerEntry


def create_states(optimizers: Iterable[OptimizerEntry], saved: Mapping[str, Described]) -> None:
    """Give every optimizer exactly the state tensors that `saved` names, unfilled.

    `saved`: `<path>.state.<parameter>.<key>` -> what was saved. What is live and fits stays.
    Raises StructureMismatch for a sharded state that has another shape than its parameter.
    """
    for entry in optimizers:
        found = _by_parameter(entry, saved)
        for parameter_name, parameter in entry.parameters.items():
            for key, name in sorted(found.get(parameter_name, ()), key=_torch_order):
                _create(entry, name, parameter, key, saved[name])


def _by_parameter(
    entry: OptimizerEntry, saved: Mapping[str, Described]
) -> dict[str, list[tuple[str, str]]]:
    """Parameter name -> (key, full name) of each saved state tensor."""
    found: dict[str, list[tuple[str, str]]] = {}
    prefix = f"{entry.path}.state."
    for name in saved:
        if name.startswith(prefix):
            parameter_name, _, key = name.removeprefix(prefix).rpartition(".")
            found.setdefault(parameter_name, []).append((key, name))
    return found


def _torch_order(item: tuple[str, str]) -> tuple[bool, str]:
    return item[0] != "step", item[0]


def _create(
    entry: OptimizerEntry, name: str, parameter: torch.Tensor, key: str, saved: Described
) -> None:
    state = entry.optimizer.state[parameter]
    live = state.get(key)
    if isinstance(live, torch.Tensor) and (live.dtype, tuple(live.shape)) == (
        saved.dtype,
        saved.shape,
    ):
        return
    if saved.shape == tuple(parameter.shape):
        # Keeps the device, the strides and a DTensor's placements.
        state[key] = torch.empty_like(parameter.detach(), dtype=saved.dtype, requires_grad=False)
        return
    if isinstance(parameter, DTensor) and saved.num_pieces > 1:
        raise StructureMismatch(
            f"{name} was saved in {saved.num_pieces} pieces and has shape {saved.shape}, its "
            f"parameter {tuple(parameter.shape)}: how it lies on the ranks can't be told. Take the "
            "optimizer's first step before restore(), so that this state exists"
        )
    device = _device(entry.optimizer, parameter, key)
    state[key] = torch.empty(saved.shape, dtype=saved.dtype, device=device)


def _device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str) -> torch.device:
    """Where torch's optimizers put it: the step counter is on the CPU unless a kernel reads it."""
    if key != "step" or parameter.device.type == "cpu":
        return parameter.device
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    on_device = group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")


def drop_gradients(gradients: Mapping[str, torch.Tensor], absent: Collection[str]) -> None:
    """Take away the gradients that were None at the save; their bytes in the file mean nothing."""
    for name in absent:
        if name in gradients:
            gradients[name].grad = None


def create_gradients(gradients: Mapping[str, torch.Tensor], saved: Collection[str]) -> None:
    """Give parameters the gradients that were saved, unfilled, and take away the others.

    `gradients`: name -> parameter. Where a rank's piece is empty it gets an empty one: operations
    on gradients are collective.
    """
    for name, parameter in gradients.items():
        if name not in saved:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.empty_like(parameter.detach(), requires_grad=False)
