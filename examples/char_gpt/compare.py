"""Compares two pulled checkpoints bit for bit, tensor by tensor and value by value.

Used by demo.py; by itself: `python -m examples.char_gpt.compare FOLDER FOLDER`. It reads the plain
safetensors files that `backstay pull` leaves and needs nothing of Backstay's.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OBJECTS = "__backstay__.objects."
_PADDING = "__backstay__.pad."
_OF_RANK = "__backstay__.rank."

_PARTS = (
    ("model", "Parameters and buffers"),
    ("optimizer", "Optimizer state"),
    ("scheduler", "Learning-rate schedule"),
    ("data", "Data position"),
    ("rng", "Random number generators"),
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One kind of state and how much of it was compared."""

    title: str
    num_values: int
    num_bytes: int
    num_different: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict on two checkpoints."""

    parts: tuple[Part, ...]
    differences: tuple[str, ...]
    """A sentence for each name that differs."""

    @property
    def equal(self) -> bool:
        """Whether every bit is the same, and there was something to compare."""
        return not self.differences and any(part.num_bytes for part in self.parts)


def compare_folders(one: Path, other: Path) -> Comparison:
    """Compare all that the shard files of two folders hold."""
    return compare(read_folder(one), read_folder(other))


def read_folder(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Name -> (type and shape, bytes) of every tensor and value in a folder's shard files.

    Raises FileNotFoundError when there is no shard file. Values of the objects blobs appear as
    `rank 0: optimizer.param_groups...`, as JSON.
    """
    paths = sorted(folder.glob("**/*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"no .safetensors file in {folder}; was the checkpoint pulled?")
    state: dict[str, tuple[str, bytes]] = {}
    for path in paths:
        for name, kind, data in _read_file(path):
            if name.startswith(_PADDING):
                continue
            if name in state:
                name = f"{name} (in {path.stem})"
            if name.startswith(_OBJECTS):
                rank = name.removeprefix(_OBJECTS)
                state |= {f"rank {rank}: {k}": v for k, v in _flatten(json.loads(data))}
            else:
                state[name] = (kind, data)
    return state


def compare(
    one: Mapping[str, tuple[str, bytes]], other: Mapping[str, tuple[str, bytes]]
) -> Comparison:
    """Every name of both sides: there, of one type and shape, and the same bytes."""
    totals = {title: [0, 0, 0] for _, title in (*_PARTS, ("", "Other"))}
    differences = []
    for name in sorted(one.keys() | other.keys()):
        why = _difference(one.get(name), other.get(name))
        if why:
            differences.append(f"{name}: {why}")
        total = totals[_title(name)]
        total[0] += 1
        total[1] += len((one.get(name) or other[name])[1])
        total[2] += bool(why)
    return Comparison(
        parts=tuple(
            Part(title=title, num_values=n, num_bytes=size, num_different=bad)
            for title, (n, size, bad) in totals.items()
            if n
        ),
        differences=tuple(differences),
    )


def _difference(one: tuple[str, bytes] | None, other: tuple[str, bytes] | None) -> str:
    if one is None or other is None:
        return f"only in the {'second' if one is None else 'first'}"
    if one[0] != other[0]:
        return f"{one[0]} in the first, {other[0]} in the second"
    if one[1] == other[1]:
        return ""
    if one[0] == "value":
        return f"{one[1].decode():.40} in the first, {other[1].decode():.40} in the second"
    different = sum(a != b for a, b in zip(one[1], other[1], strict=True))
    return f"{different} of {len(one[1])} bytes differ"


def _title(name: str) -> str:
    """The part that a name belongs to; of a rank's own names the rest decides."""
    plain = name.removeprefix(_OF_RANK)
    if plain != name:
        plain = plain.partition(".")[2]
    plain = plain.partition(": ")[2] if plain.startswith("rank ") else plain
    words = plain.replace("_", ".").replace("/", ".").split(".")
    return next((title for part, title in _PARTS if part in words), "Other")


def _read_file(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """(name, type and shape, bytes) of each tensor of a safetensors file."""
    with path.open("rb") as file:
        (header_size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_size))
        start = 8 + header_size
        for name, entry in sorted(header.items()):
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                file.seek(start + begin)
                shape = "x".join(str(size) for size in entry["shape"]) or "scalar"
                yield name, f"{entry['dtype']} {shape}", file.read(end - begin)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, tuple[str, bytes]]]:
    """Each leaf of a JSON tree under its path. A list of numbers is one leaf."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and not all(isinstance(item, int | float) for item in value):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{name}.{index}" if name else str(index))
    else:
        yield name, ("value", json.dumps(value).encode())


def main() -> int:
    """Compare the two folders named on the command line. 0: equal, 1: not, 2: wrong arguments."""
    if len(sys.argv) != 3:
        print("usage: python -m examples.char_gpt.compare FOLDER FOLDER", file=sys.stderr)
        return 2
    comparison = compare_folders(Path(sys.argv[1]), Path(sys.argv[2]))
    for part in comparison.parts:
        print(f"{part.title}: {part.num_values} compared, {part.num_different} different")
    print(*comparison.differences, sep="\n")
    return 0 if comparison.equal else 1


if __name__ == "__main__":
    sys.exit(main())
