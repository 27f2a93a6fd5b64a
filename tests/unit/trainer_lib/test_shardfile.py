"""The shard file against the stock parser and our own reader."""

import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from backstay.shardfile import (
    BIG_TENSOR_BYTES,
    DATA_ALIGNMENT,
    DTYPE_NAMES,
    HeaderFull,
    Item,
    Layout,
    ShardIndex,
    read_header,
)
from backstay_protocol.errors import CorruptData


def index_of(data: bytes) -> ShardIndex:
    def read(offset: int, buffer: memoryview) -> None:
        buffer[:] = data[offset : offset + len(buffer)]

    return read_header(read, len(data))


def file_of(layout: Layout, extras: list[Item], blob: bytes) -> bytes:
    frame = layout.frame(extras, len(blob))
    data = bytearray(frame.size)
    data[: len(frame.header)] = frame.header
    data[frame.blob_start :] = blob
    return bytes(data)


def random_items(seed: int) -> list[Item]:
    rand = random.Random(seed)
    dtypes = [*DTYPE_NAMES, torch.complex128]
    items = []
    for number in range(40):
        shape = tuple(rand.choice((1, 2, 3, 7, 64, 300)) for _ in range(rand.randrange(4)))
        if rand.random() < 0.1:
            shape = (*shape, 0)
        offsets = tuple(rand.randrange(3) * length for length in shape)
        items.append(Item(f"layer.{number}", rand.choice(dtypes), shape, offsets))
    return items


@pytest.mark.parametrize("seed", range(6))
def test_the_stock_parser_reads_any_mixture_and_everything_big_is_aligned(seed: int) -> None:
    items = random_items(seed)
    extras = [Item(f"extra.{i.name}", i.dtype, i.shape, i.offsets) for i in random_items(seed + 99)]
    layout = Layout(items, 3, extras=extras)
    data = file_of(layout, extras, b"{}" * 17)
    stock = load(data)
    index = index_of(data)
    starts = layout.frame(extras, 34).starts
    for item, start in zip([*items, *extras], [*layout.starts, *starts], strict=True):
        entry = index.entries[item.name]
        assert (entry.dtype, entry.shape, entry.offsets) == (item.dtype, item.shape, item.offsets)
        assert entry.start == start
        assert start % item.dtype.itemsize == 0
        if item.nbytes >= BIG_TENSOR_BYTES:
            assert start % 64 == 0
        assert stock[item.name].nbytes == item.nbytes
    assert layout.data_start % DATA_ALIGNMENT == 0
    assert data[slice(*index.objects)] == b"{}" * 17
    assert index.objects[1] == len(data)
    assert all("pad" not in name for name in index.entries)


def test_a_file_without_tensors_is_one_too(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(Layout([], 0), [], b"{}"))
    assert list(load_file(path)) == ["__backstay__.objects.0"]


def test_a_dtype_without_a_name_is_stored_as_bytes_and_read_as_itself() -> None:
    item = Item("c", torch.complex128, (2, 3), (4, 0))
    data = file_of(Layout([item], 0), [], b"")
    assert load(data)["c"].shape == (2, 48)
    entry = index_of(data).entries["c"]
    assert (entry.dtype, entry.shape, entry.offsets) == (torch.complex128, (2, 3), (4, 0))


def test_aliases_of_tied_tensors_are_in_the_header() -> None:
    layout = Layout([Item("a", torch.float32, (2,), (0,))], 0, aliases={"b": "a"})
    assert index_of(file_of(layout, [], b"")).aliases == {"b": "a"}


def test_planned_tensors_stay_where_they_are_while_objects_change() -> None:
    items = random_items(1)
    layout = Layout(items, 0)
    for number in (0, 1, 5):
        extras = [Item(f"x{i}", torch.uint8, (i + 1,), (0,)) for i in range(number)]
        entries = index_of(file_of(layout, extras, b"x" * number)).entries
        assert [entries[item.name].start for item in items] == list(layout.starts)
        assert math.prod(entries["x0"].shape) == 1 if number else True


def test_objects_that_outgrow_the_header_ask_for_a_new_layout() -> None:
    extras = [Item(f"a rather long name {i}", torch.uint8, (1,), (0,)) for i in range(200)]
    with pytest.raises(HeaderFull):
        Layout([], 0).frame(extras, 10)
    assert len(index_of(file_of(Layout([], 0, extras=extras), extras, b"")).entries) == 200


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff" * 100, id="absurd length"),
        pytest.param((5).to_bytes(8, "little") + b"hello", id="not JSON"),
        pytest.param((2).to_bytes(8, "little") + b"{}", id="no metadata"),
    ],
)
def test_bytes_that_are_no_shard_file_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptData):
        index_of(data)


def test_an_entry_beyond_the_end_of_the_file_is_corrupt() -> None:
    data = file_of(Layout([Item("a", torch.float32, (2,), (0,))], 0), [], b"1234")
    with pytest.raises(CorruptData):
        index_of(data[:-1])
