"""Values that are not tensors: read at each save, put back where they were at restore.

Called by structure, which finds them. What they may consist of is the business of objects.
"""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from backstay.errors import UnsupportedValue


class Value:
    """One key of the objects blob."""

    def __init__(self, key: str) -> None:
        self.key = key

    def get(self) -> Any:
        """The value now, for the objects blob."""
        raise NotImplementedError

    def set(self, value: Any) -> None:
        """Put a saved value back."""
        raise NotImplementedError


class PlainValue(Value):
    """A plain value in a container of the user's that can be written."""

    def __init__(
        self, key: str, container: MutableMapping[Any, Any] | MutableSequence[Any], index: Any
    ) -> None:
        super().__init__(key)
        self._container, self._index = container, index

    def get(self) -> Any:
        """See Value."""
        return self._container[self._index]

    def set(self, value: Any) -> None:
        """See Value."""
        self._container[self._index] = value


class StatefulValue(Value):
    """Anything with state_dict() and load_state_dict()."""

    def __init__(self, key: str, thing: Any) -> None:
        super().__init__(key)
        self._thing = thing

    def get(self) -> Any:
        """See Value."""
        return self._thing.state_dict()

    def set(self, value: Any) -> None:
        """See Value."""
        self._thing.load_state_dict(value)


class ExtraState(Value):
    """A module's get_extra_state()."""

    def __init__(self, key: str, module: nn.Module) -> None:
        super().__init__(key)
        self._module = module

    def get(self) -> Any:
        """See Value."""
        return self._module.get_extra_state()

    def set(self, value: Any) -> None:
        """See Value."""
        self._module.set_extra_state(value)


class OptimizerValues(Value):
    """Param groups and the state that is not a tensor, by parameter name.

    Good for as long as the optimizer's structure is the same: it remembers what is where.
    """

    def __init__(self, key: str, optimizer: Optimizer, names: dict[int, str]) -> None:
        super().__init__(key)
        self._optimizer, self._names = optimizer, names
        self._groups = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        self._rest = []
        for parameter, values in optimizer.state.items():
            keys = [k for k, v in values.items() if not isinstance(v, torch.Tensor)]
            if keys:
                self._rest.append((names[id(parameter)], values, keys))

    def get(self) -> Any:
        """See Value."""
        groups = [
            {key: names if key == "params" else value for key, value in group.items()}
            for group, names in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]
        state = {name: {k: values[k] for k in keys} for name, values, keys in self._rest}
        return {"param_groups": groups, "state": state}

    def set(self, value: Any) -> None:
        """See Value."""
        saved = {frozenset(group["params"]): group for group in value["param_groups"]}
        parameters = {}
        for group in self._optimizer.param_groups:
            names = frozenset(self._names[id(p)] for p in group["params"])
            parameters.update({self._names[id(p)]: p for p in group["params"]})
            if names not in saved:
                raise UnsupportedValue(
                    f"{self.key}: no saved param group holds exactly {_some(sorted(names))}; "
                    "build the optimizer with the groups that were saved"
                )
            for name, option in saved[names].items():
                if name != "params":
                    _put(group, name, option)
        for name, rest in value["state"].items():
            for key, item in rest.items():
                self._optimizer.state[parameters[name]][key] = item


def _put(group: dict[str, Any], name: str, option: Any) -> None:
    """Tensors in param groups (a learning rate on the GPU) keep their memory."""
    old = group.get(name)
    if isinstance(old, torch.Tensor) and isinstance(option, torch.Tensor):
        with torch.no_grad():
            old.copy_(option)
    else:
        group[name] = option


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"[{', '.join(names[:3])}{more}]"
