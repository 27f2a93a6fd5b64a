"""The Range header of shard reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_sidecar.routes.ranges import ByteRange, Unsatisfiable, parse_range

SIZE = 1000


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        pytest.param(None, None, id="absent"),
        pytest.param("", None, id="empty"),
        pytest.param("lines=1-2", None, id="another unit is ignored"),
        pytest.param("bytes=0-0", ByteRange(0, 1), id="one byte"),
        pytest.param("bytes=0-999", ByteRange(0, 1000), id="all"),
        pytest.param("bytes=990-2000", ByteRange(990, 1000), id="the end is cut"),
        pytest.param("bytes=999-", ByteRange(999, 1000), id="open end"),
        pytest.param("bytes=-5", ByteRange(995, 1000), id="suffix"),
        pytest.param("bytes=-5000", ByteRange(0, 1000), id="suffix longer than all"),
        pytest.param("Bytes = 1 - 2 ", ByteRange(1, 3), id="white space"),
    ],
)
def test_a_single_range_is_read(header: str | None, expected: ByteRange | None) -> None:
    assert parse_range(header, SIZE) == expected


@pytest.mark.parametrize(
    ("header", "why"),
    [
        pytest.param("bytes=1000-", "begins at byte 1000", id="after the end"),
        pytest.param("bytes=5-4", "before it begins", id="backwards"),
        pytest.param("bytes=-0", "last 0 bytes", id="empty suffix"),
        pytest.param("bytes=0-1,5-6", "several ranges", id="several"),
        pytest.param("bytes=-", "not a range", id="no numbers"),
        pytest.param("bytes=a-b", "not a range", id="letters"),
        pytest.param("bytes=1--2", "not a range", id="negative end"),
        pytest.param("bytes=" + "9" * 40 + "-", "not a range", id="absurd number"),
        pytest.param("bytes=\u0661-\u0662", "not a range", id="digits of another script"),
    ],
)
def test_what_can_not_be_served_is_named(header: str, why: str) -> None:
    with pytest.raises(Unsatisfiable, match=why):
        parse_range(header, SIZE)


@given(st.text(max_size=30), st.integers(1, 2**40))
def test_any_header_gives_bytes_inside_the_file_or_a_refusal(text: str, size: int) -> None:
    try:
        found = parse_range(f"bytes={text}", size)
    except Unsatisfiable:
        return
    assert found is not None
    assert 0 <= found.start < found.stop <= size
