"""What older minor versions wrote is read, what they need is still written, and no format changes
unnoticed (support/formats.py; docs/compatibility.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from backstay import objects, shardfile
from backstay_cli.local.state import LocalStatus
from backstay_operator.persisted import parse_record, write_record
from backstay_protocol import codec
from backstay_protocol.control import ControlBlock, Word
from backstay_protocol.files import read_small
from backstay_protocol.manifest import read_manifest
from backstay_protocol.names import PROTOCOL_VERSION, can_read
from backstay_protocol.records import AttemptFile
from support import formats

FOLDERS = sorted(formats.DATA.iterdir(), key=lambda folder: folder.name)
VERSION_WORDS = ("PROTOCOL_MINOR", "PROTOCOL_VERSION", "SCHEMA_NUMBER")

versions = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@pytest.fixture(scope="module")
def written() -> dict[str, bytes]:
    return formats.written()


def tree_of(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_bytes())


def contains(new: Any, old: Any, path: str = "") -> list[str]:
    """Where `new` lacks what `old` has; a field that was added is no difference."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            found
            for key, value in old.items()
            if key not in VERSION_WORDS
            for found in (
                contains(new[key], value, f"{path}.{key}")
                if key in new
                else [f"{path}.{key} is gone"]
            )
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) <= len(new):
        return [
            found
            for place, value in enumerate(old)
            for found in contains(new[place], value, f"{path}[{place}]")
        ]
    return [] if new == old and type(new) is type(old) else [f"{path}: {old!r} became {new!r}"]


def test_every_format_is_what_the_newest_folder_keeps(written: dict[str, bytes]) -> None:
    """After a deliberate change write the folder again: see support/formats.py."""
    folder = formats.DATA / PROTOCOL_VERSION
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(kept) == sorted(written)
    changed = [name for name, data in written.items() if kept[name] != data]
    assert changed == [], "PYTHONPATH=tests python -m support.formats, then look at git diff"


@versions
def test_messages_of_an_older_minor_are_read_and_still_say_the_same(folder: Path) -> None:
    kinds = {kind.__name__: kind for kind in formats.message_kinds()}
    for name, tree in tree_of(folder, "messages.json").items():
        read = codec.to_plain(codec.from_plain(kinds[name], tree))
        assert contains(read, tree, name) == []


@versions
def test_an_older_minor_gets_every_field_that_it_needs(
    folder: Path, written: dict[str, bytes]
) -> None:
    whole = ("messages.json", "generations.json", "local-status.json", "control.json")
    for name in (*formats.KINDS, *whole):
        new, old = json.loads(written[name]), tree_of(folder, name)
        for tree in (new, old):
            tree.pop("format", None)
            tree.pop("page", None)
        assert contains(_keys(new), _keys(old), name) == []


def _keys(tree: Any) -> Any:
    """The shape of a tree: values that are no objects, by their type."""
    if isinstance(tree, dict):
        return {key: _keys(value) for key, value in tree.items()}
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return [_keys(tree[0])]
    return type(tree).__name__


@versions
@pytest.mark.parametrize("name", ["names.json", "api-names.json", "places.json"])
def test_names_and_places_never_change(folder: Path, name: str, written: dict[str, bytes]) -> None:
    assert contains(json.loads(written[name]), tree_of(folder, name), name) == []


@versions
@pytest.mark.parametrize("name", sorted(formats.KINDS))
def test_what_was_kept_by_an_older_minor_is_read(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    read = codec.loads(formats.KINDS[name], data)
    assert contains(codec.to_plain(read), json.loads(data), name) == []


@versions
def test_a_manifest_of_every_older_minor_is_one(folder: Path) -> None:
    for name, sealed in (("manifest.json", True), ("manifest-unsealed.json", False)):
        manifest = read_manifest(read_small(str(folder / name)), name)
        assert (manifest.checkpoint, manifest.sealed) == (formats.CHECKPOINT, sealed)
        assert can_read(manifest.format)


@versions
def test_promise_and_record_of_an_older_minor_are_read(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "attempt.json"
    path.write_bytes(formats.attempt_file(tree_of(folder, "attempt-halves.json")))
    state = AttemptFile(str(path)).read()
    assert state is not None
    assert (state.promised, state.round) == (1, "round")
    assert state.record is not None
    assert (state.record.attempt, state.record.ran) == (9_000_001, True)


@versions
def test_the_control_block_of_an_older_minor_is_read_if_it_is_a_neighbour(
    folder: Path, tmp_path: Path
) -> None:
    kept = tree_of(folder, "control.json")
    path = str(tmp_path / "control")
    with open(path, "wb") as file:
        file.truncate(kept["bytes"])
        for place, word in kept["page"].items():
            file.seek(8 * int(place))
            file.write(word.to_bytes(8, "little", signed=True))
    block = ControlBlock(path, create=False)
    assert (block[Word.RANK], block[Word.STEP], block[Word.SAVE_AT_STEP]) == (3, 41, -50)
    block.close()


@versions
def test_generations_that_an_older_operator_persisted_are_read(folder: Path) -> None:
    tree = tree_of(folder, "generations.json")
    record = parse_record(tree)
    assert record is not None
    assert contains(write_record(record), tree, "generations") == []


@versions
def test_the_status_of_an_older_local_runner_is_read(folder: Path) -> None:
    data = (folder / "local-status.json").read_bytes()
    read = codec.to_plain(codec.loads(LocalStatus, data))
    assert contains(read, json.loads(data), "local-status") == []


@versions
def test_an_upgraded_operator_restarts_nobody(folder: Path, written: dict[str, bytes]) -> None:
    """The digest of a job's template is on its pods: another one means other pods."""
    assert json.loads(written["spec-digests.json"]) == tree_of(folder, "spec-digests.json")


@versions
def test_a_shard_of_an_older_minor_is_read_whole(folder: Path) -> None:
    data = (folder / "shard.safetensors").read_bytes()

    def read(offset: int, buffer: memoryview) -> None:
        buffer[:] = data[offset : offset + len(buffer)]

    index = shardfile.read_header(read, len(data))
    tensors = {
        name: torch.frombuffer(
            bytearray(data[entry.start : entry.stop]), dtype=entry.dtype
        ).reshape(entry.shape)
        for name, entry in index.entries.items()
    }
    for name, tensor in formats.SHARD_TENSORS.items():
        assert torch.equal(tensors[name], tensor), name
    assert index.entries["net.weight"].offsets == (2, 0)
    assert index.aliases == {"net.tied": "net.weight"}
    values = objects.decode(data[slice(*index.objects)], tensors)
    assert torch.equal(values.pop("inside"), formats.SHARD_VALUES["inside"])
    assert values == {k: v for k, v in formats.SHARD_VALUES.items() if k != "inside"}
