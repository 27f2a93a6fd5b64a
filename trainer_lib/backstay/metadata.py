"""The user's own JSON that goes with a checkpoint: checked where it is given, copied at once.

Called by the Checkpointer when it is made, where trouble is an error, and by running.py at each
save, where it is a warning. Manifests carry it, so it is small and says the same to every reader
of JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from backstay.errors import UnsupportedValue

LIMIT_BYTES = 1 << 20
MAX_DEPTH = 50


def plain_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy, with lists for tuples. Raises UnsupportedValue naming the place: `metadata.loss`."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise UnsupportedValue(
            f"metadata is of type {_kind(metadata)}; expected a dict of plain JSON"
        )
    _check(dict(metadata), "metadata", 0)
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        if len(text) <= LIMIT_BYTES:
            return dict(json.loads(text))
    except ValueError as error:  # an integer of thousands of digits
        raise UnsupportedValue(f"metadata is not plain JSON: {error}") from error
    raise UnsupportedValue(
        f"metadata has {len(text)} bytes as JSON, at most {LIMIT_BYTES} go with a checkpoint; give "
        "large things as entries of the state"
    )


def _check(value: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise UnsupportedValue(f"{path}: nested deeper than {MAX_DEPTH}; does it contain itself?")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UnsupportedValue(
                    f"{path}: a key of type {_kind(key)}; keys of plain JSON are text: str(key)"
                )
            _check(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise UnsupportedValue(f"{path}: {value!r} is not JSON; give None or text")
    elif not isinstance(value, (str, int, type(None))):
        raise UnsupportedValue(
            f"{path}: a value of type {_kind(value)} is not plain JSON: {_way_out(value)}"
        )


def _way_out(value: Any) -> str:
    if hasattr(value, "item"):  # tensors, arrays and their numbers
        return "give value.item() or value.tolist()"
    if isinstance(value, (set, frozenset)):
        return "give sorted(value)"
    return "give text, numbers, lists and dicts, or make it an entry of the state"


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
