"""Values through typed JSON and back."""

import collections
import dataclasses
import datetime
import enum
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from backstay import objects
from backstay.errors import UnsupportedValue
from backstay_protocol.errors import CorruptData


def through(values: dict[str, Any]) -> dict[str, Any]:
    encoded = objects.encode(values)
    tensors = {name: tensor.clone() for name, tensor in encoded.tensors}
    assert objects.tensor_names(encoded.json) == tuple(tensors)
    return objects.decode(encoded.json, tensors)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([1, 2.5, "s", True, None, [], {}], id="plain JSON"),
        pytest.param([float("inf"), -float("inf"), -0.0, 1e-320], id="unusual floats"),
        pytest.param([1 << 53, -(1 << 100), 10**400], id="big integers"),
        pytest.param((1, (2, [3])), id="tuples"),
        pytest.param([{1, 2}, frozenset({(1, 2)})], id="sets"),
        pytest.param([b"\0\xff", bytearray(b"x"), 1 - 2j], id="bytes and complex"),
        pytest.param({1: "a", (2, 3): "b", None: "c"}, id="keys that are no text"),
        pytest.param({"$": "tuple", "v": [1]}, id="a dict that looks like a type"),
        pytest.param(collections.OrderedDict([("b", 1), ("a", (2,))]), id="OrderedDict"),
        pytest.param(collections.Counter("aab"), id="Counter"),
        pytest.param(collections.deque([1, (2,)], maxlen=3), id="deque"),
        pytest.param([torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1")], id="torch"),
        pytest.param(
            [
                datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
                datetime.date(2026, 1, 2),
                datetime.time(3, 4),
                datetime.timedelta(days=-1, microseconds=3),
            ],
            id="dates",
        ),
        pytest.param([np.float32(1.5), np.int64(-3), np.str_("x"), np.bool_(True)], id="scalars"),
        pytest.param(range(2, 9, 3), id="range"),
        pytest.param(random.Random(3).getstate(), id="state of random"),
        pytest.param(["ä\ud800\u2028"], id="any text"),
    ],
)
def test_a_value_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    back = through({"entry": value})["entry"]
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set)
    assert type(back) is type(value)


def test_not_a_number_comes_back() -> None:
    assert np.isnan(through({"x": float("nan")})["x"])


def test_a_defaultdict_keeps_its_factory() -> None:
    back = through({"x": collections.defaultdict(list, a=[1])})["x"]
    assert back["new"] == []
    assert back["a"] == [1]


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(6, dtype=">i4").reshape(2, 3), id="other byte order"),
        pytest.param(np.zeros((2, 0, 3), np.float16), id="empty"),
        pytest.param(np.array(5.0), id="no dimension"),
        pytest.param(np.array(["ab", "c"]), id="text"),
        pytest.param(np.arange(12.0).reshape(3, 4).T, id="not contiguous"),
        pytest.param(np.array(["2026-01-01"], dtype="datetime64[D]"), id="dates"),
        pytest.param(np.array([1 + 2j]), id="complex"),
        pytest.param(np.array([True, False]), id="bool"),
    ],
)
def test_an_array_becomes_a_tensor_of_the_file_and_comes_back(array: Any) -> None:
    assert len(objects.encode({"x": array}).tensors) == 1
    back = through({"x": array})["x"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_tensors_are_named_by_their_place_and_never_twice() -> None:
    tensor = torch.arange(3)
    encoded = objects.encode({"a": {"b": [tensor, tensor], "b.0": tensor}}, taken={"a.b.1"})
    assert [name for name, _ in encoded.tensors] == ["a.b.0", "a.b.1~1", "a.b.0~1"]


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Record:
    x: int = 1


class Pair(NamedTuple):
    a: int


@pytest.mark.parametrize(
    ("value", "way_out"),
    [
        pytest.param(Colour.RED, "save its .value", id="enum"),
        pytest.param(Record(), "dataclasses.asdict", id="dataclass"),
        pytest.param(Pair(1), "_asdict()", id="namedtuple"),
        pytest.param(len, "functions and classes", id="function"),
        pytest.param(object(), "state_dict", id="any object"),
        pytest.param(collections.defaultdict(lambda: 1), "factory", id="defaultdict of a lambda"),
        pytest.param(np.array([object()]), "dtype object", id="array of objects"),
        pytest.param(torch.eye(2).to_sparse(), "dense", id="sparse tensor"),
        pytest.param(torch.empty(2, device="meta"), "meta device", id="meta tensor"),
    ],
)
def test_what_cannot_be_carried_is_an_error_that_names_the_place(value: Any, way_out: str) -> None:
    with pytest.raises(UnsupportedValue, match=r"^data\.list\[1\]: .*") as caught:
        objects.encode({"data": {"list": [0, value]}})
    assert way_out in str(caught.value)


def test_a_value_that_contains_itself_is_an_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedValue, match="contain itself"):
        objects.encode({"x": loop})


@pytest.mark.parametrize(
    "blob",
    [
        pytest.param(b"\xff", id="not text"),
        pytest.param(b"[1]", id="not an object"),
        pytest.param(b'{"x": {"$": "no such type", "v": 1}}', id="unknown type"),
        pytest.param(b'{"x": {"$": "tensor", "v": null, "name": "gone"}}', id="missing tensor"),
        pytest.param(b'{"x": {"$": "torch.dtype", "v": "load"}}', id="a dtype that is none"),
    ],
)
def test_bytes_that_are_no_values_are_corrupt(blob: bytes) -> None:
    with pytest.raises(CorruptData):
        objects.decode(blob, {})
