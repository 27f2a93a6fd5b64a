"""What the user's entries consist of: every tensor by name, every other value by entry.

`walk` takes the entries apart once. Modules, optimizers, containers and bare tensors give named
tensors, parameters matched to optimizers by identity, names as torch.distributed.checkpoint gives
them. Everything else gives values for the objects blob. `Structure.unchanged` is what later saves
ask: a walk by identity over the containers that hold the tensors (about 3 ms for 10,000).

Called by capture, before a plan is made, and by restore, which writes into the same tensors. It
never talks to other ranks and never calls get_state_dict (which would step the optimizer).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from backstay.errors import UnsupportedValue
from backstay.identity import IdentityWatch
from backstay.objects import check_tensor
from backstay.resumable import (
    check_entry_name,
    check_extra_state,
    check_memory,
    check_writable,
    is_stateful,
)
from backstay.values import ExtraState, OptimizerValues, PlainValue, StatefulValue, Value
from backstay_protocol.names import RESERVED

GRADIENT_PREFIX = f"{RESERVED}grad."


class Kind(Enum):
    """What a tensor is to training: decides when it may be copied."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    GRADIENT = "gradient"
    OTHER = "other"


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """One tensor of the state, as this rank holds it."""

    name: str
    """`model.emb.weight`, `optimizer.state.emb.weight.exp_avg`, `ema_decay`."""
    local: torch.Tensor
    """The memory that is saved and loaded into: detached, this rank's piece of a DTensor. Of a
    gradient: of the parameter, which has its shape (see `now`)."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the piece begins in the global tensor."""
    kind: Kind
    source: torch.Tensor
    """The object itself: Parameter, DTensor, plain tensor."""
    group: tuple[int, ...] = ()
    """Ranks known to hold this very piece, this one among them; empty: nothing is known."""
    owner: torch.Tensor | None = None
    """Optimizer state: the parameter that it belongs to."""
    optimizers: tuple[Optimizer, ...] = ()
    """Whose step changes it; empty: nobody known tells when it changes."""

    @property
    def is_dtensor(self) -> bool:
        """Whether its placements say how it is spread over ranks."""
        return isinstance(self.source, DTensor)

    @property
    def per_rank(self) -> bool:
        """Whether nothing is known about other ranks' copies: each keeps its own."""
        return not self.is_dtensor and not self.group

    def now(self) -> torch.Tensor | None:
        """The local tensor to copy at this moment; None for a gradient that is absent."""
        if self.kind is not Kind.GRADIENT:
            return self.local
        return None if self.source.grad is None else local_of(self.source.grad)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in this rank, detached."""
    tensor = tensor.detach()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def walk(
    entries: Mapping[str, Any],
    *,
    gradients: bool = False,
    rank: int = 0,
    world_size: int = 1,
    replicated: Collection[str] = (),
) -> Structure:
    """Take the entries apart.

    `replicated`: names of entries whose plain tensors the user declares equal on all ranks.
    Raises UnsupportedValue that names the entry and the way out.
    """
    unknown = set(replicated) - set(entries)
    if unknown:
        raise UnsupportedValue(
            f"replicated names {sorted(unknown)}, but the entries are {sorted(entries)}"
        )
    walker = _Walker(gradients, rank, world_size, frozenset(replicated))
    walker.add_all(entries)
    return walker.finish(entries)


@dataclass(frozen=True, eq=False)
class OptimizerEntry:
    """One optimizer of the state: what restore needs to create its state from an index."""

    path: str
    """State tensors are named `<path>.state.<parameter name>.<key>`."""
    optimizer: Optimizer
    parameters: dict[str, torch.Tensor]
    """Parameter name inside this entry -> parameter."""


@dataclass(eq=False)
class Structure:
    """The entries, taken apart at one moment."""

    entries: Mapping[str, Any]
    tensors: tuple[NamedTensor, ...]
    """Without pieces that are empty here (another rank's shard) and without aliases."""
    aliases: dict[str, str]
    """Further names of tied tensors -> the name under which they are stored."""
    optimizers: tuple[OptimizerEntry, ...] = ()
    names: frozenset[str] = frozenset()
    """Every name that the state has here, aliases and pieces that are empty here too."""
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """If they are asked for: name -> parameter, also where its piece is empty here."""
    dtensor_rows: tuple[str, ...] = ()
    """Every DTensor, empty pieces too, by what is the same on all ranks of its mesh."""
    _values: list[Value] = field(default_factory=list)
    _watch: IdentityWatch = field(default_factory=IdentityWatch)
    _modules: list[nn.Module] = field(default_factory=list)

    def unchanged(self) -> bool:
        """Whether the same objects, in the same memory, still make up the state."""
        if self._watch.same():
            return True
        return reshard(self._modules) and self._watch.same()

    def objects(self) -> dict[str, Any]:
        """Every value that is not one of `tensors`, now. Keys: see `load_objects`."""
        return {value.key: value.get() for value in self._values}

    def load_objects(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Put values back where `objects` read them. Returns keys that had no value (kept)."""
        missing = []
        for value in self._values:
            if value.key in values:
                value.set(values[value.key])
            else:
                missing.append(value.key)
        return tuple(missing)


def reshard(modules: list[nn.Module]) -> bool:
    """Bring FSDP2 parameters back to their sharded form. Returns whether there were any."""
    found = False
    for module in modules:
        method = getattr(module, "reshard", None)
        if callable(method):
            method()
            found = True
    return found


# --- the walker --------------------------------------------------------------------------------


class _Walker:
    """One pass over the entries: containers, modules first, then optimizers, then the rest."""

    def __init__(
        self, gradients: bool, rank: int, world_size: int, replicated: frozenset[str]
    ) -> None:
        self._gradients = gradients
        self._rank = rank
        self._world = tuple(range(world_size))
        self._replicated = replicated
        self._tensors: dict[str, NamedTensor] = {}
        self._names: set[str] = set()
        self._gradients_of: dict[str, torch.Tensor] = {}
        self._rows: list[str] = []
        self._aliases: dict[str, str] = {}
        self._stored: dict[int, str] = {}  # id(tensor) -> name under which it is stored
        self._home: dict[int, tuple[str, str]] = {}  # id(parameter) -> (module entry, its name)
        self._users: dict[int, list[Optimizer]] = {}
        self._values: list[Value] = []
        self._watch = IdentityWatch()
        self._optimizers: list[tuple[str, Optimizer]] = []
        self._modules: list[nn.Module] = []
        self._optimizer_entries: list[OptimizerEntry] = []

    def add_all(self, entries: Mapping[str, Any]) -> None:
        found = list(self._flatten(entries, "", entries))
        for _, _, _, thing in found:
            if isinstance(thing, Optimizer):
                self._note_users(thing)
        reshard([m for *_, t in found if isinstance(t, nn.Module) for m in t.modules()])
        for path, entry, _, thing in found:
            if isinstance(thing, nn.Module):
                self._modules.extend(thing.modules())
                _ModuleWalk(self, path, thing, self._declared(entry)).walk()
        for path, entry, (container, key), thing in found:
            self._add_thing(path, entry, container, key, thing)
        for path, optimizer in self._optimizers:
            self._add_optimizer(path, optimizer)

    def finish(self, entries: Mapping[str, Any]) -> Structure:
        return Structure(
            entries=entries,
            tensors=tuple(self._tensors.values()),
            aliases=self._aliases,
            optimizers=tuple(self._optimizer_entries),
            names=frozenset(self._names | self._gradients_of.keys()),
            gradients=self._gradients_of,
            dtensor_rows=tuple(self._rows),
            _values=self._values,
            _watch=self._watch,
            _modules=self._modules,
        )

    def _declared(self, entry: str) -> tuple[int, ...]:
        return self._world if entry in self._replicated else ()

    def _flatten(
        self, container: Any, prefix: str, entries: Any
    ) -> Iterator[tuple[str, str, tuple[Any, Any], Any]]:
        """(path, top entry, (container, key), thing) for everything in the user's containers."""
        self._watch.container(container)
        items = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, thing in items:
            path = f"{prefix}{key}"
            if container is entries:
                check_entry_name(key)
            if _is_container(thing):
                yield from self._flatten(thing, f"{path}.", entries)
            else:
                yield path, path.partition(".")[0], (container, key), thing

    def _note_users(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._users.setdefault(id(parameter), []).append(optimizer)

    def _add_thing(self, path: str, entry: str, container: Any, key: Any, thing: Any) -> None:
        if isinstance(thing, nn.Module):
            self._watch.item(container, key, thing)
        elif isinstance(thing, Optimizer):
            self._watch.item(container, key, thing)
            self._optimizers.append((path, thing))
        elif isinstance(thing, torch.Tensor):
            self._watch.item(container, key, thing)
            if isinstance(thing, nn.Parameter):
                self._home.setdefault(id(thing), ("", path))
            kind = Kind.PARAMETER if isinstance(thing, nn.Parameter) else Kind.OTHER
            self.add_tensor(path, thing, kind, self._declared(entry))
        elif is_stateful(thing, path):
            self._watch.item(container, key, thing)
            self._values.append(StatefulValue(path, thing))
        else:
            check_writable(path, container, thing)
            self._values.append(PlainValue(path, container, key))

    def add_tensor(
        self,
        name: str,
        source: torch.Tensor,
        kind: Kind,
        group: tuple[int, ...],
        owner: torch.Tensor | None = None,
        optimizers: tuple[Optimizer, ...] | None = None,
    ) -> None:
        self._names.add(name)
        stored = self._stored.setdefault(id(source), name)
        if stored != name:
            self._aliases[name] = stored
            return
        if name in self._tensors:
            raise UnsupportedValue(
                f"two tensors would be called {name!r}; give one of the entries another name"
            )
        check_tensor(source, name)
        users = tuple(self._users.get(id(source), ())) if optimizers is None else optimizers
        local, offsets = _piece(name, source)
        check_memory(name, local)
        if isinstance(source, DTensor):
            self._rows.append(_row(name, source))
            group = replica_ranks(source)
        if local.numel() or not source.numel():
            tensor = NamedTensor(
                name=name,
                local=local,
                global_shape=tuple(source.shape),
                offsets=offsets,
                kind=kind,
                source=source,
                group=group if self._rank in group else (),
                owner=owner,
                optimizers=users,
            )
            self._tensors[name] = tensor
        if self._gradients and kind is Kind.PARAMETER and source.requires_grad:
            self._gradients_of[f"{GRADIENT_PREFIX}{name}"] = source
            if name in self._tensors:
                self._add_gradient(self._tensors[name])

    def _add_gradient(self, parameter: NamedTensor) -> None:
        name = f"{GRADIENT_PREFIX}{parameter.name}"
        self._tensors[name] = NamedTensor(
            name=name,
            local=parameter.local,
            global_shape=parameter.global_shape,
            offsets=parameter.offsets,
            kind=Kind.GRADIENT,
            source=parameter.source,
            group=parameter.group if parameter.is_dtensor else (),
        )

    def add_parameter(self, entry: str, name: str, source: torch.Tensor) -> None:
        self._home.setdefault(id(source), (entry, name))

    def managed(self, parameters: Iterator[torch.Tensor]) -> tuple[Optimizer, ...]:
        """Optimizers that train any of these."""
        found: dict[int, Optimizer] = {}
        for parameter in parameters:
            for optimizer in self._users.get(id(parameter), ()):
                found[id(optimizer)] = optimizer
        return tuple(found.values())

    def users(self, parameter: torch.Tensor) -> tuple[Optimizer, ...]:
        return tuple(self._users.get(id(parameter), ()))

    @property
    def watch(self) -> IdentityWatch:
        return self._watch

    @property
    def values(self) -> list[Value]:
        return self._values

    def group_of(self, parameter: torch.Tensor) -> tuple[int, ...]:
        stored = self._tensors.get(self._stored.get(id(parameter), ""))
        return stored.group if stored is not None else ()

    def _add_optimizer(self, path: str, optimizer: Optimizer) -> None:
        names = self._names_in(path, optimizer)
        self._watch_groups(optimizer)
        for parameter, state in optimizer.state.items():
            if id(parameter) not in names:
                raise UnsupportedValue(
                    f"{path}: its state holds something for {str(parameter)[:60]!r}, which is in "
                    "none of its param groups; such state can't be named"
                )
            self._watch.item(optimizer.state, parameter, state)
            self._watch.container(state)
            ranks = self._state_group(parameter)
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    self._watch.item(state, key, value)
                    name = f"{path}.state.{names[id(parameter)]}.{key}"
                    self.add_tensor(name, value, Kind.OPTIMIZER, ranks, parameter, (optimizer,))
        self._values.append(OptimizerValues(path, optimizer, names))
        parameters = {names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}
        self._optimizer_entries.append(OptimizerEntry(path, optimizer, parameters))

    def _watch_groups(self, optimizer: Optimizer) -> None:
        """load_state_dict() puts other dicts and lists in the place of these."""
        watch, attributes = self._watch, optimizer.__dict__
        watch.item(attributes, "state", optimizer.state)
        watch.container(optimizer.state)
        watch.item(attributes, "param_groups", optimizer.param_groups)
        watch.container(optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            watch.item(optimizer.param_groups, number, group)
            watch.item(group, "params", group["params"])
            watch.container(group["params"])
            for index, parameter in enumerate(group["params"]):
                watch.item(group["params"], index, parameter)

    def _state_group(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Ranks on which a plain state tensor of this parameter is the same."""
        if isinstance(parameter, DTensor):
            return tuple(sorted(parameter.device_mesh.mesh.reshape(-1).tolist()))
        return self.group_of(parameter)

    def _names_in(self, path: str, optimizer: Optimizer) -> dict[int, str]:
        """Parameter names inside one optimizer: as in its module.

        With the module entry's name in front where the parameters come from several entries.
        """
        homes: dict[int, tuple[str, str]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in self._home:
                    raise UnsupportedValue(
                        f"{path}: parameter {index} of its group {number}, of shape "
                        f"{tuple(parameter.shape)}, is in no module of the state; add the module "
                        "that holds it as an entry, or the parameter itself"
                    )
                homes[id(parameter)] = self._home[id(parameter)]
        several = len({entry for entry, _ in homes.values()}) > 1
        return {
            i: f"{entry}.{name}" if several and entry else name
            for i, (entry, name) in homes.items()
        }


class _ModuleWalk:
    """One module entry: names without the wrappers' parts, groups from DDP and FSDP."""

    def __init__(
        self, walker: _Walker, entry: str, root: nn.Module, declared: tuple[int, ...]
    ) -> None:
        self._walker = walker
        self._entry = entry
        self._root = root
        self._declared = declared
        self._trained_by = walker.managed(iter(root.parameters()))
        self._seen: set[int] = set()

    def walk(self) -> None:
        self._module(self._root, "", self._declared, _mesh_of(self._root))

    def _module(
        self, module: nn.Module, prefix: str, group: tuple[int, ...], mesh: tuple[int, ...]
    ) -> None:
        if isinstance(module, DistributedDataParallel):
            group = tuple(sorted(dist.get_process_group_ranks(module.process_group)))
        elif hasattr(module, "reshard"):
            mesh = _mesh_of(module) or mesh
        again = id(module) in self._seen
        self._seen.add(id(module))
        self._tensors(module, prefix, group, mesh, again)
        if not again:
            self._walker.watch.container(module._modules)
        for name, child in module._modules.items():
            if child is None:
                continue
            if not again:
                self._walker.watch.item(module._modules, name, child)
            below = prefix if _is_wrapper(module, name) else f"{prefix}{name}."
            self._module(child, below, group, mesh)

    def _tensors(
        self,
        module: nn.Module,
        prefix: str,
        group: tuple[int, ...],
        mesh: tuple[int, ...],
        again: bool,
    ) -> None:
        walker = self._walker
        containers: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for container in containers:
            if not again:
                walker.watch.container(container)
            for name, tensor in container.items():
                if tensor is None or name in _skipped(module, container):
                    continue
                if not again:
                    walker.watch.item(container, name, tensor)
                full = f"{self._entry}.{prefix}{name}"
                if container is module._buffers:
                    walker.add_tensor(full, tensor, Kind.BUFFER, group or mesh)
                    continue
                walker.add_parameter(self._entry, f"{prefix}{name}", tensor)
                users = walker.users(tensor) or self._trained_by
                walker.add_tensor(full, tensor, Kind.PARAMETER, group, None, users)
        if type(module).get_extra_state is not nn.Module.get_extra_state and not again:
            check_extra_state(f"{self._entry}.{prefix}".rstrip("."), module)
            key = f"{self._entry}.{prefix}_extra_state"
            walker.values.append(ExtraState(key, module))


def _skipped(module: nn.Module, container: Any) -> Collection[str]:
    """Buffers that the module's author calls not part of its state."""
    return module._non_persistent_buffers_set if container is module._buffers else ()


def _is_wrapper(module: nn.Module, child: str) -> bool:
    """Whether the name of this child is left out of names, as DCP leaves it out."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return child == "module"
    return child in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def _mesh_of(module: nn.Module) -> tuple[int, ...]:
    """Ranks over which a module's DTensor parameters are spread; empty if it has none."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            return tuple(sorted(parameter.device_mesh.mesh.reshape(-1).tolist()))
    return ()


def replica_ranks(tensor: DTensor) -> tuple[int, ...]:
    """Ranks that hold the same piece of a DTensor as this one, from mesh and placements."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else coordinate[i]
        for i, placement in enumerate(tensor.placements)
    )
    return tuple(sorted(tensor.device_mesh.mesh[index].reshape(-1).tolist()))


def _piece(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The memory of a tensor in this rank, and where it begins in the whole."""
    local = local_of(tensor)
    if not isinstance(tensor, DTensor):
        return local, (0,) * tensor.ndim
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise UnsupportedValue(
            f"{name}: a DTensor with a Partial placement is not a value yet; redistribute it first"
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if local.numel() and tuple(shape) != tuple(local.shape):
        raise UnsupportedValue(
            f"{name}: this rank's piece has shape {tuple(local.shape)}, its placements "
            f"{tensor.placements} say {tuple(shape)}: several "
            "pieces of one tensor in one rank can't be saved"
        )
    return local, tuple(offsets)


def _row(name: str, tensor: DTensor) -> str:
    mesh = tuple(tensor.device_mesh.shape)
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {mesh} {tensor.placements}"


def _is_container(thing: Any) -> bool:
    return type(thing) in (dict, list, tuple) and any(_needs_a_place(v) for v in _leaves(thing))


def _leaves(thing: Any) -> Iterator[Any]:
    if type(thing) is dict:
        for value in thing.values():
            yield from _leaves(value)
    elif type(thing) in (list, tuple):
        for value in thing:
            yield from _leaves(value)
    else:
        yield thing


def _needs_a_place(thing: Any) -> bool:
    """Things that are saved and restored as themselves, not as a value (or refused as such)."""
    return isinstance(thing, (torch.Tensor, nn.Module, Optimizer, DataLoader)) or any(
        hasattr(thing, name) for name in ("state_dict", "load_state_dict", "__next__")
    )
