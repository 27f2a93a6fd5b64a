"""From the bytes of a shard file into live tensors, chunk by chunk.

A `Piece` says which bytes of the file fill which view of a live tensor. Used by load.py to plan and
by shard_reader.py while verified chunks arrive, from several threads at once (pieces never overlap
in their targets). It allocates nothing that grows with the state.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from backstay.boxes import is_run, position

MOST_VIEWS = 1024  # IOV_MAX


class Piece:
    """Part of one saved tensor and the live memory that it fills."""

    def __init__(
        self,
        start: int,
        shape: tuple[int, ...],
        offsets: tuple[int, ...],
        target: torch.Tensor,
    ) -> None:
        """`start`: byte of the file at which the saved tensor of `shape` begins.

        `offsets`: where in it the wanted box begins; the box has the shape of `target`, a view of
        live memory of the saved type.
        """
        item = target.element_size()
        target = target.detach()
        if not shape:
            shape, offsets, target = (1,), (0,), target.reshape(1)
        lengths = tuple(target.shape)
        first = position(offsets, shape)
        last = position(tuple(o + n - 1 for o, n in zip(offsets, lengths, strict=True)), shape)
        self.start = start + first * item
        """First byte that is wanted."""
        self.stop = start + (last + 1) * item
        """End of the last byte that is wanted; between the two there may be unwanted ones."""
        self.address = 0
        """Where the bytes go if they are one run on both sides and on the CPU, else 0."""
        if is_run(lengths, shape) and target.is_contiguous():
            shape, offsets, target = (target.numel(),), (0,), target.view(-1)
            start = self.start
            if target.device.type == "cpu":
                self.address = target.data_ptr()
        self.target = target
        self._origin = start
        self._shape = shape
        self._offsets = offsets

    @property
    def on_device(self) -> bool:
        """Whether the target is not in host memory."""
        return self.target.device.type != "cpu"

    def fill(self, begin: int, data: memoryview) -> None:
        """Take from `data`, the file's bytes from `begin` on, whatever belongs here."""
        low, high = max(begin, self.start), min(begin + len(data), self.stop)
        if low >= high:
            return
        if self.address:
            source = ctypes.addressof(ctypes.c_char.from_buffer(data)) + low - begin
            ctypes.memmove(self.address + low - self.start, source, high - low)
            return
        raw = torch.frombuffer(data, dtype=torch.uint8)
        _fill_rows(raw, begin, self._origin, self._shape, self._offsets, self.target)


def _fill_rows(
    raw: torch.Tensor,
    begin: int,
    origin: int,
    shape: Sequence[int],
    offsets: Sequence[int],
    target: torch.Tensor,
) -> None:
    """Copy whole rows (indices of the first dimension) at once, rows cut by the chunk one by one.

    Elements are aligned in the file and chunks are larger: no element is ever cut.
    """
    row = math.prod(shape[1:]) * target.element_size()
    low = max(begin, origin) - origin
    high = min(begin + raw.numel(), origin + shape[0] * row) - origin
    if low >= high:
        return
    first, last = -(-low // row), high // row
    here, there = max(first, offsets[0]), min(last, offsets[0] + target.shape[0])
    if here < there:
        at = origin + here * row - begin
        rows = raw[at : at + (there - here) * row].view(target.dtype)
        box = rows.view(there - here, *shape[1:])
        for dim in range(1, len(shape)):
            box = box.narrow(dim, offsets[dim], target.shape[dim])
        target[here - offsets[0] : there - offsets[0]].copy_(box, non_blocking=True)
    for index in {low // row, high // row} - set(range(first, last)):
        inside = index - offsets[0]
        if 0 <= inside < target.shape[0] and len(shape) > 1:
            _fill_rows(raw, begin, origin + index * row, shape[1:], offsets[1:], target[inside])


class Targets:
    """The pieces of one shard, found by chunk."""

    def __init__(self, pieces: Iterable[Piece], chunk_size: int) -> None:
        """`pieces` may be in any order."""
        self._chunks: dict[int, list[Piece]] = defaultdict(list)
        self.on_device = False
        for piece in sorted(pieces, key=lambda p: p.start):
            self.on_device |= piece.on_device
            for chunk in range(piece.start // chunk_size, -(-piece.stop // chunk_size)):
                self._chunks[chunk].append(piece)
        self.chunks = tuple(sorted(self._chunks))
        """Indices of all chunks in which there is anything wanted."""

    def of(self, chunk: int) -> list[Piece]:
        """The pieces that begin, end or go on in one chunk, by their place in the file."""
        return self._chunks[chunk]

    def fill(self, chunk: int, begin: int, data: memoryview) -> None:
        """Give verified bytes of `chunk` (all of it or a part, from byte `begin`) to its pieces."""
        with torch.no_grad():
            for piece in self._chunks[chunk]:
                piece.fill(begin, data)
        if self.on_device:
            self._finish(chunk)

    def views(self, chunk: int, start: int, stop: int) -> list[memoryview] | None:
        """Memory that the whole chunk, bytes [start, stop) of the file, can be read straight into.

        The targets themselves, and fresh memory for what nobody wants; None where targets are not
        single runs in host memory, are too many, or are less than half of the chunk.
        """
        pieces = self._chunks[chunk]
        if len(pieces) > MOST_VIEWS // 2 or not all(piece.address for piece in pieces):
            return None
        views, at, unwanted = [], start, 0
        for piece in pieces:
            low, high = max(piece.start, start), min(piece.stop, stop)
            if low < at:
                return None
            unwanted += low - at
            views.extend(_fresh(low - at))
            raw = (ctypes.c_char * (high - low)).from_address(piece.address + low - piece.start)
            views.append(memoryview(raw).cast("B"))
            at = high
        views.extend(_fresh(stop - at))
        return views if 2 * (unwanted + stop - at) <= stop - start else None

    @staticmethod
    def of_buffer(data: bytearray, begin: int, chunk_size: int) -> Targets:
        """The one target that takes the file's bytes from `begin` on as they are."""
        target = torch.frombuffer(data, dtype=torch.uint8)
        return Targets([Piece(begin, (len(data),), (0,), target)], chunk_size)

    def _finish(self, chunk: int) -> None:
        """`data` may be used again once this returns: wait for the copies out of it."""
        for device in {p.target.device for p in self._chunks[chunk] if p.on_device}:
            torch.accelerator.current_stream(device).synchronize()


def batches(views: Iterable[memoryview], most: int) -> Iterator[list[memoryview]]:
    """The same memory in the same order, `most` bytes at a time: cut where large, joined where
    small.
    """
    batch: list[memoryview] = []
    room = most
    for view in views:
        while len(view) >= room:
            yield [*batch, view[:room]]
            view, batch, room = view[room:], [], most
        if view:
            batch.append(view)
            room -= len(view)
    if batch:
        yield batch


def _fresh(count: int) -> list[memoryview]:
    return [memoryview(bytearray(count))] if count else []
