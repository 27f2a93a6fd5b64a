from __future__ import annotations

import numpy
import pytest
import torch

from backstay.errors import UnsupportedValue
from backstay.metadata import LIMIT_BYTES, plain_json

LOOP: dict = {}
LOOP["again"] = LOOP


def test_plain_json_is_copied_and_tuples_become_lists() -> None:
    given = {"a": [1, None, True, "x", {"b": (1.5, 2)}], "c": numpy.float64(0.5)}

    taken = plain_json(given)
    given["a"].append("later")

    assert taken == {"a": [1, None, True, "x", {"b": [1.5, 2]}], "c": 0.5}
    assert plain_json(None) == {}


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"tags": {"a"}}, r"^metadata\.tags: a value of type set .* sorted\(value\)"),
        ({"a": [{"b": object()}]}, r"^metadata\.a\[0\]\.b: a value of type object"),
        ({"loss": torch.zeros(())}, r"^metadata\.loss: .*torch\.Tensor .*value\.item\(\)"),
        ({"n": numpy.int64(3)}, r"^metadata\.n: .*numpy\.int64 .*value\.item\(\)"),
        ({"loss": float("nan")}, r"^metadata\.loss: nan is not JSON"),
        ({"a": {1: 2}}, r"^metadata\.a: a key of type int; .* str\(key\)"),
        ({"b": b"x"}, r"^metadata\.b: a value of type bytes"),
        ({"n": 10**5000}, "^metadata is not plain JSON"),
        (LOOP, "does it contain itself"),
        ({"x": "y" * LIMIT_BYTES}, "give large things as entries"),
        ([("a", 1)], "^metadata is of type list; expected a dict"),
    ],
    ids=[
        "set", "nested", "tensor", "numpy", "nan", "key", "bytes", "digits", "loop", "size", "list"
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused_where_it_stands(metadata, says) -> None:
    with pytest.raises(UnsupportedValue, match=says):
        plain_json(metadata)
