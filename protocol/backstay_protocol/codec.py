"""Frozen dataclasses to JSON and back, checked, without a dependency.

Reading is strict about what it knows (types, missing fields) and lenient about what it does not
(an unknown field is a neighbour's newer minor version). Errors name the path of the field.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from functools import cache
from typing import Any, TypeVar

from backstay_protocol.errors import ProtocolError
from backstay_protocol.ids import CheckpointId

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """A JSON-ready tree. CheckpointId is written as its name, mappings keep string keys."""
    if isinstance(value, CheckpointId):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(v) for v in value]
    return value


def dumps(value: Any) -> bytes:
    """Compact UTF-8 JSON of a message."""
    return json.dumps(to_plain(value), separators=(",", ":"), allow_nan=False).encode()


def loads(kind: type[T], data: bytes | str) -> T:
    """Read one message. Raises ProtocolError that names the message and the field."""
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"{kind.__name__}: not JSON: {error}") from error
    return from_plain(kind, tree)


def from_plain(kind: type[T], tree: Any) -> T:
    """Read one message from a JSON tree. Raises ProtocolError that names the field."""
    return typing.cast(T, _read(kind, tree, kind.__name__))


@cache
def _fields(kind: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((f, hints[f.name]) for f in dataclasses.fields(kind))


def _read(kind: Any, value: Any, path: str) -> Any:
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(typing.get_args(kind), value, path)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), value, path)
    if origin is list:
        return list(_read_tuple((*typing.get_args(kind), ...), value, path))
    if origin is frozenset:
        return frozenset(_read_tuple((*typing.get_args(kind), ...), value, path))
    if origin is dict:
        return _read_dict(typing.get_args(kind), value, path)
    if kind is CheckpointId:
        return _read_checkpoint(value, path)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, path)
    return _read_scalar(kind, value, path)


def _read_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in options:
        return None
    rest = [o for o in options if o is not type(None)]
    assert len(rest) == 1, f"{path}: only Optional unions are messages"
    return _read(rest[0], value, path)


def _read_tuple(args: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(path, "a list", value)
    if len(args) == 2 and args[1] is ...:
        return tuple(_read(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if len(value) != len(args):
        raise _wrong(path, f"{len(args)} values", value)
    return tuple(
        _read(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True))
    )


def _read_dict(args: tuple[Any, ...], value: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong(path, "an object", value)
    key, item = args
    try:
        keys = [int(k) if key is int else k for k in value]
    except ValueError as error:
        raise _wrong(path, "integer keys", value) from error
    return {k: _read(item, v, f"{path}.{k}") for k, v in zip(keys, value.values(), strict=True)}


def _read_checkpoint(value: Any, path: str) -> CheckpointId:
    if not isinstance(value, str):
        raise _wrong(path, "<step>-<attempt>", value)
    try:
        return CheckpointId.parse(value)
    except ValueError as error:
        raise ProtocolError(f"{path}: {error}") from error


def _read_dataclass(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(path, "an object", value)
    given: dict[str, Any] = {}
    for field, hint in _fields(kind):
        if field.name in value:
            given[field.name] = _read(hint, value[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ProtocolError(f"{path}.{field.name}: missing")
    try:
        return kind(**given)
    except ValueError as error:
        raise ProtocolError(f"{path}: {error}") from error


def _read_scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _wrong(path, kind.__name__, value)


def _wrong(path: str, expected: str, value: Any) -> ProtocolError:
    return ProtocolError(f"{path}: expected {expected}, got {str(value)[:60]!r}")
