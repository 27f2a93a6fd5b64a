from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backstay.scatter import Piece, Targets, batches


def file_of(tensor: torch.Tensor, start: int) -> bytearray:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return bytearray(b"\xee" * start + raw + b"\xee" * 24)


def deliver(targets: Targets, file: bytearray, chunk_size: int) -> None:
    for chunk in reversed(targets.chunks):
        begin = chunk * chunk_size
        targets.fill(chunk, begin, memoryview(file)[begin : begin + chunk_size])


@st.composite
def cuts(draw: st.DrawFn):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    lengths = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    chunk_size = draw(st.sampled_from([8, 16, 64, 4096]))
    return shape, offsets, lengths, dtype, chunk_size, draw(st.booleans())


@given(cuts())
def test_any_box_of_any_type_arrives_whole_whatever_the_chunks(cut) -> None:
    shape, offsets, lengths, dtype, chunk_size, transposed = cut
    saved = torch.randint(0, 100, shape).to(dtype)
    live = torch.zeros(lengths, dtype=dtype)
    if transposed and len(lengths) > 1:
        live = torch.zeros((lengths[1], lengths[0], *lengths[2:]), dtype=dtype).transpose(0, 1)
    start = 16
    targets = Targets([Piece(start, shape, offsets, live)], chunk_size)

    deliver(targets, file_of(saved, start), chunk_size)

    expected = saved
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        expected = expected.narrow(dim, offset, length)
    assert torch.equal(live, expected)


def test_a_large_tensor_can_be_read_straight_into_its_memory() -> None:
    live = torch.zeros(64, dtype=torch.float32)
    targets = Targets([Piece(64, (64,), (0,), live)], 512)

    views = targets.views(0, 0, 512)

    assert views is not None
    assert [len(view) for view in views] == [64, 256, 192]
    views[1][:4] = torch.ones(1).numpy().tobytes()
    assert live[0] == 1


@pytest.mark.parametrize(
    "live",
    [torch.zeros(4, 4).t(), torch.zeros(4, 4)[:, :2], torch.zeros(2, 2)],
    ids=["transposed", "columns", "small-part-of-the-chunk"],
)
def test_what_is_not_one_large_run_is_not_read_straight(live: torch.Tensor) -> None:
    targets = Targets([Piece(0, (4, 4), (0, 0), live)], 4096)

    assert targets.views(0, 0, 4096) is None


def test_a_parameter_that_requires_grad_is_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    saved = torch.arange(16.0).view(4, 4)
    targets = Targets([Piece(0, (4, 4), (0, 1), parameter[:, :3])], 32)

    deliver(targets, file_of(saved, 0), 32)

    assert torch.equal(parameter[:, :3], saved[:, 1:])


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 30))
def test_batches_are_the_same_memory_in_order_cut_to_size(lengths: list[int], most: int) -> None:
    memory = memoryview(bytearray(range(256)) * 4)
    views, at = [], 0
    for length in lengths:
        views.append(memory[at : at + length])
        at += length
    found = list(batches(views, most))
    assert b"".join(view for batch in found for view in batch) == memory[:at]
    assert all(sum(map(len, batch)) == most for batch in found[:-1])
    assert all(0 < sum(map(len, batch)) <= most for batch in found)
