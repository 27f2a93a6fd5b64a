"""The shard file: plain safetensors without holes, every big tensor aligned.

Three sections after a header that ends on a 4 KiB boundary: the planned tensors, whose places stay
the same from save to save; tensors found inside objects, whose number and shapes may change; the
blob of typed JSON, last. Only the header, the second and the third section depend on a save.

Tensors are ordered by the largest power of two that divides their size, so that each start is a
multiple of its tensor's own alignment; only a big tensor of odd size needs a filler after it. The
stock parser refuses holes, so fillers are tensors with reserved names. Every tensor has an entry
in DCP_SHARDING_INFO, or the stock HuggingFaceStorageReader fails.

Called by capture (Layout) and by load (read_header). It must not touch tensors: it only says where
bytes are.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from backstay_protocol.errors import CorruptData
from backstay_protocol.names import RESERVED, objects_name

DATA_ALIGNMENT = 4096
BIG_TENSOR_BYTES = 1 << 16
BIG_TENSOR_ALIGNMENT = 64
HEADER_LENGTH_BYTES = 8
HEADER_SPARE_BYTES = 2048
HEADER_LIMIT_BYTES = 100_000_000  # of the stock parser
SHARDING_INFO = "DCP_SHARDING_INFO"
TRUE_DTYPES = "BACKSTAY_DTYPES"
ALIASES = "BACKSTAY_ALIASES"

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class HeaderFull(Exception):
    """The header reserved for this layout is too short for these objects: make a new layout."""


@dataclass(frozen=True)
class Item:
    """One tensor of a shard file: name in the file, and which piece of the global tensor it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Frame:
    """What one save writes around its planned tensors. All positions are file offsets."""

    header: bytes
    """Everything before the data, from offset 0."""
    starts: tuple[int, ...]
    """Of the object tensors, in the order given."""
    fillers: tuple[tuple[int, int], ...]
    """(start, bytes) that hold nothing; what is in them does not matter."""
    blob_start: int
    size: int
    """Bytes of the file."""


class Layout:
    """Where each tensor of one plan lies in the shard file of one rank."""

    def __init__(
        self,
        items: Sequence[Item],
        rank: int,
        *,
        extras: Sequence[Item] = (),
        aliases: dict[str, str] | None = None,
    ) -> None:
        """Place `items`; reserve a header that fits `extras` and some more.

        `aliases`: further names of a tied tensor -> the name under which it is stored.
        """
        self.items = tuple(items)
        self.rank = rank
        self._aliases = aliases or {}
        section = _Section(rank, "", 0)
        section.place(self.items)
        self._static = section
        self._end = section.end
        self._frames: dict[tuple[tuple[Item, ...], int], Frame] = {}
        header = len(self._header_body(self._tail(extras)[0], 1 << 40))
        spare = header - section.header_bytes + HEADER_SPARE_BYTES
        self.data_start = _round_up(HEADER_LENGTH_BYTES + header + spare, DATA_ALIGNMENT)
        self.starts = tuple(self.data_start + start for start in section.starts)

    def frame(self, extras: Sequence[Item], blob_bytes: int) -> Frame:
        """The header and the positions of one save. Raises HeaderFull."""
        key = (tuple(extras), blob_bytes)
        if key not in self._frames:
            self._frames = {key: self._make_frame(extras, blob_bytes)}
        return self._frames[key]

    def size(self, extras: Sequence[Item], blob_bytes: int) -> int:
        """Bytes of the file of such a save, whether or not its header fits this layout."""
        return self.data_start + self._tail(extras)[0].end + blob_bytes

    def _tail(self, extras: Sequence[Item]) -> tuple[_Section, int]:
        """The section of the object tensors, and the filler before it."""
        section = _Section(self.rank, "objects.", self._end)
        filler = section.fill(BIG_TENSOR_ALIGNMENT) if extras else 0
        section.place(extras)
        return section, filler

    def _make_frame(self, extras: Sequence[Item], blob_bytes: int) -> Frame:
        section, _ = self._tail(extras)
        body = self._header_body(section, blob_bytes)
        room = self.data_start - HEADER_LENGTH_BYTES
        if len(body) > room:
            raise HeaderFull(f"header of {len(body)} bytes, reserved are {room}")
        header = struct.pack("<Q", room) + body + b" " * (room - len(body))
        base = self.data_start
        return Frame(
            header=header,
            starts=tuple(base + start for start in section.starts),
            fillers=tuple((base + at, n) for at, n in (*self._static.fillers, *section.fillers)),
            blob_start=base + section.end,
            size=base + section.end + blob_bytes,
        )

    def _header_body(self, section: _Section, blob_bytes: int) -> bytes:
        name = objects_name(self.rank)
        blob = _Section(self.rank, "", section.end)
        blob.add(Item(name, torch.uint8, (blob_bytes,), (0,)))
        parts = (self._static, section, blob)
        entries = ",".join(p.entries for p in parts if p.entries)
        info = ",".join(p.info for p in parts if p.info)
        metadata = {"DCP_VERSION": "1.0", "format": "pt"}
        exotic = {k: v for p in parts for k, v in p.exotic.items()}
        if exotic:
            metadata[TRUE_DTYPES] = json.dumps(exotic, separators=(",", ":"))
        if self._aliases:
            metadata[ALIASES] = json.dumps(self._aliases, separators=(",", ":"))
        rest = json.dumps(metadata, separators=(",", ":"))[1:]
        return f'{{{entries},"__metadata__":{{"{SHARDING_INFO}":"{{{info}}}",{rest}}}'.encode()


class _Section:
    """Tensors placed one after the other, and their header entries as text."""

    def __init__(self, rank: int, label: str, start: int) -> None:
        self.end = start
        self.starts: tuple[int, ...] = ()
        self.fillers: list[tuple[int, int]] = []
        self.exotic: dict[str, list[Any]] = {}
        self._rank = rank
        self._label = label
        self._entries: list[str] = []
        self._info: list[str] = []

    @cached_property
    def entries(self) -> str:
        """Header entries. Ask only when everything is placed."""
        return ",".join(self._entries)

    @cached_property
    def info(self) -> str:
        """Pieces of DCP_SHARDING_INFO, escaped to stand inside a JSON string."""
        return ",".join(self._info)

    @property
    def header_bytes(self) -> int:
        return sum(map(len, self._entries)) + sum(map(len, self._info))

    def place(self, items: Sequence[Item]) -> None:
        """Add all in the order that aligns them; `starts` tells where each one is."""
        order = sorted(range(len(items)), key=lambda i: -_alignment(items[i].nbytes))
        starts = [0] * len(items)
        for index in order:
            starts[index] = self.end
            self.add(items[index])
            if items[index].nbytes >= BIG_TENSOR_BYTES:
                self.fill(BIG_TENSOR_ALIGNMENT)
        self.starts = tuple(starts)

    def add(self, item: Item) -> None:
        shape, offsets = item.shape, item.offsets
        if item.dtype not in DTYPE_NAMES:
            self.exotic[item.name] = [str(item.dtype).removeprefix("torch."), len(shape)]
            shape, offsets = _as_bytes(item)
        stop = self.end + item.nbytes
        name = json.dumps(item.name)
        dtype = DTYPE_NAMES.get(item.dtype, "U8")
        self._entries.append(
            f'{name}:{{"dtype":"{dtype}","shape":{_numbers(shape)},'
            f'"data_offsets":{_numbers((self.end, stop))}}}'
        )
        info = f'{name}:{{"saved_offsets":{_numbers(offsets)}}}'
        self._info.append(json.dumps(info)[1:-1])
        self.end = stop

    def fill(self, alignment: int) -> int:
        """A filler up to the next multiple; no holes are allowed."""
        missing = -self.end % alignment
        if missing:
            self.fillers.append((self.end, missing))
            name = f"{RESERVED}pad.{self._rank}.{self._label}{len(self.fillers)}"
            self.add(Item(name, torch.uint8, (missing,), (0,)))
        return missing


def _alignment(nbytes: int) -> int:
    """The largest power of two that divides a size, as far as it matters."""
    if nbytes >= BIG_TENSOR_BYTES and nbytes % BIG_TENSOR_ALIGNMENT:
        return BIG_TENSOR_ALIGNMENT  # a filler after it brings it there
    return min(nbytes & -nbytes, DATA_ALIGNMENT) if nbytes else DATA_ALIGNMENT


def _as_bytes(item: Item) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A dtype that safetensors has no name for is U8 with a longer last dimension."""
    width = item.dtype.itemsize
    if not item.shape:
        return (width,), (0,)
    shape = (*item.shape[:-1], item.shape[-1] * width)
    return shape, (*item.offsets[:-1], item.offsets[-1] * width)


def _numbers(values: Sequence[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# --- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One tensor in a shard file, with its true dtype, and where its bytes are in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class ShardIndex:
    """What a shard file's header says. Fillers and the objects blob are not among `entries`."""

    entries: dict[str, Entry]
    objects: tuple[int, int]
    """Byte range [start, stop) of the typed JSON; empty if the file has none."""
    data_start: int
    aliases: dict[str, str] = field(default_factory=dict)
    """Further name of a tied tensor -> name under which it is stored."""


def read_header(read: Callable[[int, memoryview], None], size: int) -> ShardIndex:
    """Read the index of a shard file of `size` bytes.

    `read(offset, buffer)` fills the whole buffer from that offset of the file. Raises CorruptData
    if the header is not one that this library wrote.
    """
    length = bytearray(HEADER_LENGTH_BYTES)
    if size < HEADER_LENGTH_BYTES:
        raise CorruptData(f"a shard file of {size} bytes has no header")
    read(0, memoryview(length))
    (count,) = struct.unpack("<Q", length)
    if count > min(size - HEADER_LENGTH_BYTES, HEADER_LIMIT_BYTES):
        raise CorruptData(f"a shard file of {size} bytes says its header has {count}")
    text = bytearray(count)
    read(HEADER_LENGTH_BYTES, memoryview(text))
    try:
        return _parse_header(json.loads(text), HEADER_LENGTH_BYTES + count, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptData(f"not a shard file's header: {error!r}") from error


def _parse_header(header: dict[str, Any], base: int, size: int) -> ShardIndex:
    metadata = header.pop("__metadata__")
    info = json.loads(metadata[SHARDING_INFO])
    exotic = json.loads(metadata.get(TRUE_DTYPES, "{}"))
    entries, objects = {}, (base, base)
    for name, raw in header.items():
        start, stop = (base + int(offset) for offset in raw["data_offsets"])
        if not base <= start <= stop <= size:
            raise ValueError(f"{name} lies at {start}..{stop} of {size} bytes")
        if name.startswith(f"{RESERVED}pad."):
            continue
        if name.startswith(f"{RESERVED}objects."):
            objects = (start, stop)
            continue
        entries[name] = _entry(raw, info[name]["saved_offsets"], exotic.get(name), start, stop)
    aliases = json.loads(metadata.get(ALIASES, "{}"))
    return ShardIndex(entries=entries, objects=objects, data_start=base, aliases=aliases)


def _entry(
    raw: dict[str, Any], saved_offsets: list[int], exotic: list[Any] | None, start: int, stop: int
) -> Entry:
    shape, offsets = tuple(map(int, raw["shape"])), tuple(map(int, saved_offsets))
    dtype = DTYPES[raw["dtype"]]
    if exotic is not None:
        dtype, dimensions = _dtype_named(exotic[0]), int(exotic[1])
        shape = (*shape[:-1], shape[-1] // dtype.itemsize)[:dimensions]
        offsets = (*offsets[:-1], offsets[-1] // dtype.itemsize)[:dimensions]
    if math.prod(shape) * dtype.itemsize != stop - start or len(offsets) != len(shape):
        raise ValueError(f"{shape} of {dtype} at {offsets} does not fill {stop - start} bytes")
    return Entry(dtype, shape, offsets, start, stop)


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype
