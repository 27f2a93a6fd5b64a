"""What of the user's state can be put back at restore; what can't is refused before it is saved.

Called by structure at every walk. Each refusal names the entry and the way out.
"""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from backstay.errors import UnsupportedValue
from backstay_protocol.names import RESERVED


def is_stateful(thing: Any, path: str) -> bool:
    """Whether it has state_dict and load_state_dict. Raises for what can't be resumed at all."""
    if callable(getattr(thing, "state_dict", None)):
        if callable(getattr(thing, "load_state_dict", None)):
            return True
        raise UnsupportedValue(
            f"entry {path!r} ({type(thing).__name__}) has state_dict() but no load_state_dict(); "
            "without it the state could not be put back"
        )
    if isinstance(thing, DataLoader):
        raise UnsupportedValue(
            f"entry {path!r}: a plain DataLoader can't say where it is in its data. Use "
            "torchdata.stateful_dataloader.StatefulDataLoader (same arguments), or give an entry "
            "for a sampler of your own with state_dict() and load_state_dict()"
        )
    if hasattr(thing, "__next__"):
        raise UnsupportedValue(
            f"entry {path!r}: an iterator or generator ({type(thing).__name__}) can't be resumed. "
            "Give what it was made from, with state_dict() and load_state_dict()"
        )
    return False


def check_writable(path: str, container: Any, value: Any) -> None:
    """Whether a plain value can be put back where it is. Raises UnsupportedValue."""
    if not isinstance(container, (MutableMapping, MutableSequence)):
        raise UnsupportedValue(
            f"{path}: a value of type {type(value).__name__} in a {type(container).__name__} can't "
            "be put back at restore; keep it in a dict or a list"
        )


def check_memory(name: str, local: torch.Tensor) -> None:
    """Memory that can be written element by element. Raises UnsupportedValue."""
    if any(n > 1 and not step for n, step in zip(local.shape, local.stride(), strict=True)):
        raise UnsupportedValue(
            f"{name}: an expanded tensor (shape {tuple(local.shape)}, strides {local.stride()}): "
            "several elements share one place in memory, which can't be written at restore; keep "
            "tensor.contiguous(), or what it was expanded from"
        )


def check_extra_state(path: str, module: nn.Module) -> None:
    """Whether a module takes back what it gives. Raises UnsupportedValue."""
    if type(module).set_extra_state is nn.Module.set_extra_state:
        raise UnsupportedValue(
            f"{path} ({type(module).__name__}) has get_extra_state() but no set_extra_state(); "
            "without it the state could not be put back"
        )


def check_entry_name(name: Any) -> None:
    """Text that no name of Backstay's own begins with. Raises UnsupportedValue."""
    if not isinstance(name, str) or not name or name.startswith(RESERVED):
        raise UnsupportedValue(
            f"entry names are text, not empty, and do not begin with {RESERVED!r}; got {name!r}"
        )
