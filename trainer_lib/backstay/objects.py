"""Typed JSON for everything that is not a tensor: no unpickler anywhere.

Plain JSON values stand for themselves. Anything else is an object with the key "$" that names its
type: {"$": "tuple", "v": [...]}. Tensors and arrays become entries of their own in the shard file
and are named in the JSON. What can't be carried is an error that names the place and the way out.

Called by capture (encode, at the moment of the save) and by load (decode).
"""

from __future__ import annotations

import base64
import collections
import datetime
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backstay.errors import UnsupportedValue
from backstay_protocol.errors import CorruptData
from backstay_protocol.names import RESERVED

TYPE = "$"
VALUE = "v"
MAX_DEPTH = 100
BLOB_BYTES = 1024
SAFE_INTEGER = 1 << 53  # beyond it other readers of JSON lose digits
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}


@dataclass(frozen=True)
class Encoded:
    """What `encode` made of one rank's values."""

    json: bytes
    tensors: tuple[tuple[str, torch.Tensor], ...]
    """(name, tensor) for tensors found inside the values. Not copied: still the caller's memory
    wherever the value was a tensor or an array of the native byte order."""


def encode(values: Mapping[str, Any], taken: Collection[str] = ()) -> Encoded:
    """Turn values into typed JSON and tensors. `taken`: names that the tensors must not use.

    Raises UnsupportedValue naming the place (`entry.key[3]`), the type and the way out.
    """
    encoder = _Encoder(set(taken))
    tree = {key: encoder.encode(value, key, 0) for key, value in values.items()}
    data = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    data += b" " * (-len(data) % BLOB_BYTES)  # a steady size keeps the header as it is
    return Encoded(json=data, tensors=tuple(encoder.tensors))


def decode(data: bytes | memoryview, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The values again. `tensors`: those that `encode` named, already loaded.

    Tensors are handed through as they are; arrays share the memory of theirs. Raises CorruptData.
    """
    try:
        tree = json.loads(bytes(data))
        return {key: _decode(value, tensors) for key, value in tree.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptData(f"not an objects blob: {error!r}") from error


def tensor_names(data: bytes | memoryview) -> tuple[str, ...]:
    """Names of the tensors that `decode` will ask for. Raises CorruptData."""
    names: list[str] = []
    try:
        _collect(json.loads(bytes(data)), names)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptData(f"not an objects blob: {error!r}") from error
    return tuple(names)


def _collect(tree: Any, names: list[str]) -> None:
    if isinstance(tree, list):
        for item in tree:
            _collect(item, names)
    elif isinstance(tree, dict):
        if tree.get(TYPE) in ("tensor", "ndarray"):
            names.append(tree["name"])
        for item in tree.values():
            _collect(item, names)


class _Encoder:
    """One walk over the values of a save."""

    def __init__(self, taken: set[str]) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._taken = taken

    def encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in (str, bool, type(None)):
            return value
        if kind is int:
            return value if abs(value) < SAFE_INTEGER else _typed("int", hex(value))
        if kind is float:
            return value if math.isfinite(value) else _typed("float", repr(value))
        if depth > MAX_DEPTH:
            raise UnsupportedValue(
                f"{path}: nested deeper than {MAX_DEPTH}; does it contain itself?"
            )
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict:
            return self._dict(value, path, depth)
        if isinstance(value, torch.Tensor):
            return _typed("tensor", None, name=self._add(value, path))
        container = self._container(value, path, depth)
        return _scalar(value, path) if container is None else container

    def _items(self, value: Any, path: str, depth: int) -> list[Any]:
        if all(type(v) is int and -SAFE_INTEGER < v < SAFE_INTEGER for v in value):
            return list(value)
        return [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str for key in value) and TYPE not in value:
            return {k: self.encode(v, f"{path}.{k}", depth + 1) for k, v in value.items()}
        return _typed("dict", self._pairs(value, path, depth))

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [
                self.encode(k, f"the key {k!r:.60} of {path}", depth + 1),
                self.encode(v, f"{path}.{k}", depth + 1),
            ]
            for k, v in value.items()
        ]

    def _container(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is tuple:
            return _typed("tuple", self._items(value, path, depth))
        if kind in (set, frozenset):
            return _typed(kind.__name__, self._items(value, path, depth))
        if kind is collections.deque:
            return _typed("deque", self._items(value, path, depth), maxlen=value.maxlen)
        if kind is collections.OrderedDict:
            return _typed("OrderedDict", self._pairs(value, path, depth))
        if kind is collections.Counter:
            return _typed("Counter", self._pairs(value, path, depth))
        if kind is collections.defaultdict:
            factory = _factory_name(value.default_factory, path)
            return _typed("defaultdict", self._pairs(value, path, depth), factory=factory)
        return self._numpy(value, path)

    def _numpy(self, value: Any, path: str) -> Any:
        numpy = sys.modules.get("numpy")  # a value of it exists only where it was imported
        if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
            return None
        if type(value) is not numpy.ndarray and isinstance(value, numpy.ndarray):
            raise _unsupported(value, path, "give a plain array (numpy.asarray(x))")
        array = numpy.asarray(value)
        if array.dtype.kind not in "biufcmMSU":
            raise _unsupported(
                value, path, f"arrays of dtype {array.dtype} can't be saved; give numbers or lists"
            )
        scalar = not isinstance(value, numpy.ndarray)
        if scalar:
            raw = base64.b64encode(array.tobytes()).decode()
            return _typed("scalar", raw, dtype=array.dtype.str)
        flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        if not flat.flags.writeable:
            flat = flat.copy()
        name = self._add(torch.from_numpy(flat), path)
        return _typed("ndarray", list(array.shape), name=name, dtype=array.dtype.str)

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        check_tensor(tensor, path)
        if type(tensor).__name__ == "DTensor":
            raise UnsupportedValue(
                f"{path}: a DTensor inside of a state_dict() that Backstay does not know; give the "
                "module and the optimizer themselves as entries, it takes them apart by itself"
            )
        stem = path.removeprefix(RESERVED).replace("[", ".").replace("]", "")
        name, number = stem, 0
        while name in self._taken:
            number += 1
            name = f"{stem}~{number}"
        self._taken.add(name)
        self.tensors.append((name, tensor.detach()))
        return name


def check_tensor(tensor: torch.Tensor, path: str) -> None:
    """Whether a tensor's bytes can be saved as they are. Raises UnsupportedValue naming `path`."""
    if tensor.layout is not torch.strided:
        raise UnsupportedValue(
            f"{path}: a tensor of layout {tensor.layout}; only dense tensors can be saved: "
            "keep its indices() and values() instead"
        )
    if tensor.is_quantized:
        raise UnsupportedValue(f"{path}: a quantized tensor; keep its int_repr() and scales")
    if tensor.device.type == "meta":
        raise UnsupportedValue(
            f"{path}: a tensor on the meta device has no values; materialise it first (to_empty)"
        )


def _scalar(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in (bytes, bytearray):
        return _typed(kind.__name__, base64.b64encode(value).decode())
    if kind is complex:
        return _typed("complex", [repr(value.real), repr(value.imag)])
    if kind is torch.Size:
        return _typed("torch.Size", list(value))
    if kind in (torch.dtype, torch.device):
        return _typed(f"torch.{kind.__name__}", str(value).removeprefix("torch."))
    if kind in (datetime.datetime, datetime.date, datetime.time):
        return _typed(kind.__name__, _isoformat(value, path))
    if kind is datetime.timedelta:
        return _typed("timedelta", [value.days, value.seconds, value.microseconds])
    if kind is range:
        return _typed("range", [value.start, value.stop, value.step])
    raise _unsupported(value, path, _way_out(value))


def _isoformat(value: Any, path: str) -> str:
    zone = getattr(value, "tzinfo", None)
    if zone is not None and type(zone) is not datetime.timezone:
        raise _unsupported(value, path, "with a named time zone; use a fixed offset or UTC")
    return str(value.isoformat())


def _way_out(value: Any) -> str:
    if callable(value):
        return "functions and classes can't be saved; keep its name and look it up again"
    if hasattr(value, "_fields"):
        return "save value._asdict()"
    if hasattr(value, "value") and hasattr(value, "name"):
        return "save its .value"
    if hasattr(value, "__dataclass_fields__"):
        return "save dataclasses.asdict(value)"
    return "give numbers, text, lists, dicts, tensors or arrays, or state_dict()/load_state_dict()"


def _unsupported(value: Any, path: str, way_out: str) -> UnsupportedValue:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsupportedValue(f"{path}: a value of type {kind} can't be saved: {way_out}")


def _factory_name(factory: Any, path: str) -> str | None:
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise UnsupportedValue(
            f"{path}: a defaultdict whose factory is {factory!r}; use dict, or one of "
            f"{', '.join(_FACTORIES)} as its factory"
        )
    return str(name)


def _typed(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {TYPE: kind, VALUE: value, **more}


# --- decoding ----------------------------------------------------------------------------------


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(TYPE)
    if kind is None:
        return {key: _decode(value, tensors) for key, value in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]]
    if kind == "ndarray":
        return _array(tree, tensors)
    if kind == "scalar":
        return _numpy_scalar(tree)
    if kind == "deque":
        return collections.deque(_decode(tree[VALUE], tensors), maxlen=tree["maxlen"])
    if kind == "defaultdict":
        factory = None if tree["factory"] is None else _FACTORIES[tree["factory"]]
        return collections.defaultdict(factory, _decode_pairs(tree[VALUE], tensors))
    if kind in _PAIRS:
        return _PAIRS[kind](_decode_pairs(tree[VALUE], tensors))
    return _DECODERS[kind](_decode(tree[VALUE], tensors))


def _decode_pairs(tree: Any, tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {_decode(k, tensors): _decode(v, tensors) for k, v in tree}


def _array(tree: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:

    flat = tensors[tree["name"]].numpy()
    return flat.view(_numpy_dtype(tree["dtype"])).reshape([int(n) for n in tree[VALUE]])


def _numpy_scalar(tree: dict[str, Any]) -> Any:
    import numpy

    raw = base64.b64decode(tree[VALUE])
    return numpy.ndarray((), dtype=_numpy_dtype(tree["dtype"]), buffer=raw)[()]


def _numpy_dtype(text: str) -> Any:
    import numpy

    dtype = numpy.dtype(str(text))
    if dtype.hasobject:
        raise ValueError(f"arrays of {text} are not read")
    return dtype


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype


_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "torch.Size": torch.Size,
    "torch.dtype": _dtype,
    "torch.device": torch.device,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "range": lambda parts: range(*parts),
}
