from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstay_protocol.control import ControlBlock
from backstay_protocol.files import (
    make_folder,
    open_shared,
    read_small,
    sync_folder,
    write_atomically,
)
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout

POINT = CheckpointId(5, 1_000_002)
NAME = "000000000005-000000000001000002"


def test_the_memory_volume() -> None:
    memory = MemoryLayout("/m/")
    assert memory.socket == "/m/agent.sock"
    assert memory.attempt_file == "/m/attempt.json"
    assert memory.control(3) == "/m/ranks/3/control"
    assert memory.slot(3, 1) == "/m/ranks/3/slot-1"
    assert memory.slot_manifest(3, 1) == "/m/ranks/3/slot-1.json"


def test_the_local_disk() -> None:
    disk = DiskLayout("/d/", "ns/run", 2)
    assert disk.attempt_file == "/d/ns/run/replica-2/attempt.json"
    assert disk.shard(disk.shards, POINT, 7) == f"{disk.folder}/shards/{NAME}/00007.safetensors"
    assert disk.manifest(disk.replicas, POINT, 7) == f"{disk.folder}/replicas/{NAME}/00007.json"


@pytest.mark.parametrize(
    ("prefix", "root"), [("", "ns/run/"), ("a/b", "a/b/ns/run/"), ("/a/", "a/ns/run/")]
)
def test_the_remote_tier(prefix: str, root: str) -> None:
    remote = RemoteLayout(prefix, "ns/run")
    assert remote.root == root
    assert remote.run_record == f"{root}run.json"
    assert remote.claim(7) == f"{root}attempts/000000000000000007.json"
    assert remote.base(7) == f"{root}attempts/000000000000000007.base.json"
    assert remote.commit(POINT) == f"{root}checkpoints/{NAME}/commit.json"
    assert remote.pin(POINT) == f"{root}checkpoints/{NAME}/pin.json"
    assert remote.deletion(POINT) == f"{root}deletions/{NAME}"
    for key, suffix in (
        (remote.shard(POINT, 7), "safetensors"),
        (remote.manifest(POINT, 7), "json"),
    ):
        assert remote.parse_shard_key(key) == (POINT, 7, suffix)


@pytest.mark.parametrize(
    "key",
    ["x", "ns/run/checkpoints/5-6/commit.json", "ns/run/checkpoints/5/1.json", "ns/run/run.json"],
)
def test_other_keys_are_no_shards(key: str) -> None:
    assert RemoteLayout("", "ns/run").parse_shard_key(key) is None


def test_an_older_runs_name_that_begins_alike_is_not_mistaken() -> None:
    assert RemoteLayout("", "ns/run").root != RemoteLayout("", "ns/run2").root
    assert RemoteLayout("", "ns/run2").root.startswith("ns/run2/")


# --- small files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_whole(tmp_path: Path, sync: bool) -> None:
    path = str(tmp_path / "f")
    write_atomically(path, b"one")
    write_atomically(path, b"two" * 10_000, sync=sync)
    assert read_small(path) == b"two" * 10_000
    assert os.listdir(tmp_path) == ["f"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660


@pytest.fixture
def private() -> Iterator[None]:
    """The umask of a process that lets nobody else in."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("private")
def test_what_both_sides_share_is_open_to_their_group_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "ranks" / "0"
    make_folder(str(folder))
    make_folder(str(folder))
    write_atomically(str(folder / "manifest"), b"x")
    os.close(open_shared(str(folder / "slot"), os.O_RDWR | os.O_CREAT))
    ControlBlock(str(folder / "control"), create=True, rank=0).close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        **{"ranks": 0o2770, "0": 0o2770},
        **{"manifest": 0o660, "slot": 0o660, "control": 0o660},
    }


@pytest.mark.usefixtures("private")
def test_a_file_with_a_mode_of_its_own_is_nobody_elses_business(tmp_path: Path) -> None:
    write_atomically(str(tmp_path / "token"), b"x", mode=0o644)
    assert stat.S_IMODE(os.stat(tmp_path / "token").st_mode) == 0o600


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ranks").touch()
    with pytest.raises(FileExistsError):
        make_folder(str(tmp_path / "ranks"))


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "x").touch()
    with pytest.raises(OSError, match="folder"):
        write_atomically(str(target), b"data")  # a folder can't be replaced by a file
    assert os.listdir(tmp_path) == ["folder"]


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(str(tmp_path / "none" / "f"), b"")
    with pytest.raises(FileNotFoundError):
        sync_folder(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        read_small(str(tmp_path / "none"))


def test_a_name_without_a_folder_is_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_atomically("f", b"x")
    assert read_small("f") == b"x"
