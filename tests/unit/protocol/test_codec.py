from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay_protocol import codec, messages, records
from backstay_protocol.errors import ProtocolError
from backstay_protocol.ids import CheckpointId

SCALAR = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5)
FREE = st.dictionaries(st.text(max_size=3), SCALAR | st.lists(SCALAR, max_size=2), max_size=2)
st.register_type_strategy(
    CheckpointId, st.builds(CheckpointId, st.integers(0, 10**12 - 1), st.integers(0, 10**18 - 1))
)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))


def message_types() -> list[type]:
    found = {
        kind
        for module in (messages, records)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if dataclasses.is_dataclass(kind) and kind is not CheckpointId
    }
    return sorted(found, key=lambda kind: kind.__name__)


def any_of(kind: type) -> st.SearchStrategy[Any]:
    """Any value of a message; its fields of free JSON get small trees."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: FREE for name, hint in hints.items() if "Any" in str(hint)})


@pytest.mark.parametrize("kind", message_types(), ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type) -> None:
    @settings(max_examples=8, database=None)
    @given(any_of(kind))
    def roundtrip(message: Any) -> None:
        assert codec.loads(kind, codec.dumps(message)) == message

    roundtrip()


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: int
    ratio: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner | None = None
    pair: tuple[int, str] = (0, "")
    many: tuple[int, ...] = ()
    items: list[int] = field(default_factory=list)
    seen: frozenset[int] = frozenset()
    table: dict[int, Inner] = field(default_factory=dict)
    names: dict[str, bool] = field(default_factory=dict)
    point: CheckpointId | None = None
    free: Any = None

    def __post_init__(self) -> None:
        if self.name == "wrong":
            raise ValueError("that name can't be")


def test_all_kinds_of_fields_survive() -> None:
    value = Outer(
        name="é",
        inner=Inner(number=1, ratio=0.5),
        pair=(3, "x"),
        many=(1, 2),
        items=[4],
        seen=frozenset({5}),
        table={7: Inner(number=8)},
        names={"a": True},
        point=CheckpointId(1, 2),
        free={"k": [None, 1.5]},
    )
    assert codec.loads(Outer, codec.dumps(value)) == value


def test_an_unknown_field_is_a_neighbouring_versions() -> None:
    assert codec.loads(Outer, b'{"name": "n", "later": 1}') == Outer(name="n")


def test_whole_numbers_are_fine_where_a_float_is_expected() -> None:
    assert codec.from_plain(Inner, {"number": 1, "ratio": 2}).ratio == 2.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "Outer: not JSON"),
        ("[]", "Outer: expected an object, got '[]'"),
        ("{}", "Outer.name: missing"),
        ('{"name": 1}', "Outer.name: expected str, got '1'"),
        ('{"name": "n", "inner": {"number": true}}', "Outer.inner.number: expected int"),
        (
            '{"name": "n", "inner": {"number": 1, "ratio": true}}',
            "Outer.inner.ratio: expected float",
        ),
        ('{"name": "n", "inner": {"number": 1.5}}', "Outer.inner.number: expected int, got '1.5'"),
        ('{"name": "n", "pair": [1]}', "Outer.pair: expected 2 values"),
        ('{"name": "n", "many": 1}', "Outer.many: expected a list"),
        ('{"name": "n", "many": [1, "2"]}', "Outer.many[1]: expected int"),
        ('{"name": "n", "table": []}', "Outer.table: expected an object"),
        ('{"name": "n", "table": {"x": {}}}', "Outer.table: expected integer keys"),
        ('{"name": "n", "table": {"1": {}}}', "Outer.table.1.number: missing"),
        ('{"name": "n", "names": {"a": 1}}', "Outer.names.a: expected bool"),
        ('{"name": "n", "point": 5}', "Outer.point: expected <step>-<attempt>"),
        ('{"name": "n", "point": "5"}', "Outer.point: not a checkpoint name: '5'"),
        ('{"name": "wrong"}', "Outer: that name can't be"),
    ],
)
def test_errors_name_the_field_and_what_was_expected(text: str, error: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(error)):
        codec.loads(Outer, text)


def test_what_json_can_not_carry_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        codec.dumps(Inner(number=1, ratio=float("nan")))
    with pytest.raises(AssertionError, match="only Optional unions"):
        codec.from_plain(_Union, {"value": 1})  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Union:
    value: int | str
