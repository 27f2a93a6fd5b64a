"""Every format that outlives a process or crosses between two, as the present code writes it.

`tests/data/formats/<protocol version>/` keeps what each minor version wrote. The newest folder must
be what is written here, byte for byte, so that no change of a format goes unnoticed; after a
deliberate one write it again, and read docs/compatibility.md first:

    PYTHONPATH=tests .venv/bin/python -m support.formats
"""

from __future__ import annotations

import array
import dataclasses
import enum
import io
import json
import tempfile
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from backstay import objects, shardfile
from backstay_cli.local.state import LocalStatus, NodeRecord
from backstay_operator.api import names as api_names
from backstay_operator.api import read_job
from backstay_operator.decide import JobRecord, PodRecord
from backstay_operator.manifests import wiring
from backstay_operator.manifests.cluster_pod import spec_digest
from backstay_operator.persisted import write_record
from backstay_protocol import codec, control, messages, names
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, MemoryLayout, RemoteLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.records import (
    HALF_BYTES,
    AttemptFile,
    AttemptRecord,
    AttemptState,
    Claim,
    CommitRecord,
    Intent,
)
from backstay_protocol.topology import PodIdentity, Topology

DATA = Path(__file__).resolve().parents[1] / "data" / "formats"
CHECKPOINT = CheckpointId(1200, 1_796_000_000_000_001)
KINDS: dict[str, type] = {
    "claim.json": Claim,
    "base.json": AttemptRecord,
    "commit.json": CommitRecord,
    "intent.json": Intent,
    "topology.json": Topology,
    "pod.json": PodIdentity,
    "manifest.json": Manifest,
    "manifest-unsealed.json": Manifest,
}
"""Files that hold one message, compact, as the codec writes it."""

# Where a value made of nothing but types would be refused.
_CHECKED: dict[str, Any] = {
    "Schedule.every_seconds": 0.0,
    "Topology.replicas": 1,
    "Topology.processes_per_replica": 2,
    "Peer.replica": 0,
    "MemoryTier.slots": 3,
    "RemoteTier.endpoint": "https://store.example:9000",
    "ManualChoice.attempt": 7,
    "ManualChoice.run": "",
    "ManualChoice.fresh": False,
    "AttemptRecord.attempt": 9_000_001,
}


def written() -> dict[str, bytes]:
    """File name -> its bytes, of every format."""
    found = {name: codec.dumps(sample(kind)) for name, kind in KINDS.items()}
    found["manifest.json"] = _manifest(sealed=True).to_json()
    found["manifest-unsealed.json"] = _manifest(sealed=False).to_json()
    found["messages.json"] = _pretty({kind.__name__: sample(kind) for kind in message_kinds()})
    found["names.json"] = _pretty(_constants(names))
    found["api-names.json"] = _pretty(_constants(api_names) | _pod_names())
    found["control.json"] = _pretty(_control())
    found["places.json"] = _pretty(_places())
    found["attempt-halves.json"] = _pretty(_attempt_halves())
    found["generations.json"] = _pretty(write_record(_job_record()))
    found["local-status.json"] = codec.dumps(_local_status())
    found["spec-digests.json"] = _pretty(_spec_digests())
    found["shard.safetensors"] = _shard()
    return found


def message_kinds() -> list[type]:
    """Every dataclass of backstay_protocol.messages."""
    return sorted(
        (
            value
            for value in vars(messages).values()
            if dataclasses.is_dataclass(value)
            and isinstance(value, type)
            and value.__module__.startswith("backstay_protocol.messages")
        ),
        key=lambda kind: kind.__name__,
    )


def sample(kind: type) -> Any:
    """A value of a message in which every field says something."""
    return _sample(kind, kind.__name__, 1)


def _sample(kind: Any, path: str, number: int) -> Any:
    if path in _CHECKED:
        return _CHECKED[path]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _sample(next(a for a in arguments if a is not type(None)), path, number)
    if origin is tuple:
        parts = [a for a in arguments if a is not ...]
        return tuple(_sample(part, path, number + i) for i, part in enumerate(parts))
    if origin is dict:
        return {_sample(arguments[0], path, number): _sample(arguments[1], path, number)}
    if kind is CheckpointId:
        return CHECKPOINT
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        given = {
            field.name: _sample(hints[field.name], f"{kind.__name__}.{field.name}", place)
            for place, field in enumerate(dataclasses.fields(kind), 1)
        }
        return kind(**given)
    if kind is Any:
        return {"any": number}
    scalars: dict[Any, Any] = {bool: True, int: number, float: number + 0.5}
    return scalars.get(kind, path.rpartition(".")[2])


def _manifest(*, sealed: bool) -> Manifest:
    manifest = Manifest(
        run="default/char-gpt",
        step=CHECKPOINT.step,
        attempt=CHECKPOINT.attempt,
        rank=1,
        world_size=3,
        replica=1,
        plan="5d41402abc4b2a76b9719d911017c592",
        size=100_000,
        created=1_796_000_400.25,
        chain=((1_795_999_900_000_001, 900),),
        chunk_size=65_536,
        reason="forced",
        metadata={"epoch": 3, "note": "größer"},
    )
    digests = ("1c8f0a2b3d4e5f60718293a4b5c6d7e8", "0f1e2d3c4b5a69788796a5b4c3d2e1f0")
    return manifest.seal(digests, "9f6b2c54e1d8a3770c2f4be6d1a95e38") if sealed else manifest


def _constants(module: types.ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if name.isupper() and not name.startswith("_") and isinstance(value, (str, int, tuple))
    }


def _pod_names() -> dict[str, Any]:
    found = _constants(wiring)
    found["pod_name"] = wiring.pod_name("gpt", 3, 1_796_000_000)
    found["hostname"] = wiring.hostname("gpt", 3)
    return found


def _control() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/control"
        block = control.ControlBlock(path, create=True, rank=3)
        block[control.Word.STEP] = 41
        block[control.Word.SAVE_AT_STEP] = -50
        block.close()
        page = array.array("q", Path(path).read_bytes())
    return {
        "words": _members(control.Word),
        "states": _members(control.State),
        "page": {str(place): word for place, word in enumerate(page) if word},
        "bytes": names.CONTROL_BYTES,
    }


def _members(kind: type[enum.IntEnum]) -> dict[str, int]:
    return {member.name: int(member) for member in kind}


def _places() -> dict[str, Any]:
    memory = MemoryLayout("/memory")
    disk = DiskLayout("/disk", "default/char-gpt", 3)
    remote = RemoteLayout("jobs", "default/char-gpt")
    return {
        "memory": [
            *(memory.socket, memory.attempt_file, memory.deleted_file, memory.control(5)),
            *(memory.slot(5, 1), memory.slot_manifest(5, 1)),
        ],
        "disk": [
            *(disk.attempt_file, disk.deleted_file),
            DiskLayout.shard(disk.shards, CHECKPOINT, 5),
            DiskLayout.manifest(disk.replicas, CHECKPOINT, 5),
            disk.restores_file,
        ],
        "remote": [
            *(remote.run_record, remote.claim(7), remote.base(7), remote.commit(CHECKPOINT)),
            *(remote.shard(CHECKPOINT, 5), remote.manifest(CHECKPOINT, 5)),
            *(remote.pin(CHECKPOINT), remote.deletion(CHECKPOINT), remote.explanation(7)),
        ],
    }


def _attempt_halves() -> list[str]:
    """Both halves of attempt.json without their padding."""
    with tempfile.TemporaryDirectory() as folder:
        file = AttemptFile(f"{folder}/attempt.json")
        file.prepare()
        state: AttemptState = sample(AttemptState)
        file.write(dataclasses.replace(state, promised=8_000_001, in_line=0))
        file.write(state)
        data = Path(file.path).read_bytes()
    halves = (data[:HALF_BYTES], data[HALF_BYTES:])
    return [half.rstrip(b"\0").decode() for half in halves]


def attempt_file(halves: list[str]) -> bytes:
    """What `_attempt_halves` was read from."""
    return b"".join(half.encode().ljust(HALF_BYTES, b"\0") for half in halves)


def _job_record() -> JobRecord:
    return JobRecord(
        first_generation=1_796_000_000,
        generation=1_796_000_002,
        pods={
            0: PodRecord(generation=1_796_000_002, replaces=1_796_000_000, node="node-b"),
            1: PodRecord(generation=1_796_000_000, created=True, node="node-c"),
        },
        choice="1200-7",
        choice_number=2,
        outcome="Succeeded",
        outcome_reason="Completed",
        outcome_message="all replicas completed",
        ended_at=1_796_000_900.0,
        drain_since=1_796_000_100.0,
        flush_since=1_796_000_800.0,
        safe_end=True,
    )


def _local_status() -> LocalStatus:
    return LocalStatus(
        uid="0f1e2d3c",
        job="gpt",
        namespace="default",
        run="default/gpt",
        replicas=2,
        created=1_796_000_000.5,
        manifest="/jobs/gpt.yaml",
        spec_digest="5d41402a",
        hosts={0: "127.7.7.100", 1: "127.7.7.101"},
        record=_job_record(),
        nodes=(NodeRecord(name="node-0", replica=0), NodeRecord(name="node-1", replica=1)),
        next_node=2,
        running={0: 1_796_000_002},
        conditions=({"type": "Running", "status": "True"},),
        bucket="checkpoints",
        prefix="jobs",
        region="us-east-1",
        endpoint="http://127.7.7.99:9000",
        embedded=True,
        store_endpoint="http://127.7.7.99:9000",
    )


def _spec_digests() -> dict[str, str]:
    """Another digest replaces every pod of a job: an upgraded operator must not."""
    return {name: spec_digest(read_job(tree)) for name, tree in _jobs()}


def _jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    container = {"name": "trainer", "image": "trainer:1", "command": ["python", "train.py"]}
    template = {"spec": {"containers": [container]}}
    memory = {"everySteps": 10, "sizeLimit": "1Gi"}
    for name, checkpoint in (
        ("small", {"memory": memory}),
        (
            "whole",
            {
                "runName": "long-run",
                "memory": {**memory, "slots": 3},
                "local": {"volume": "pvc", "size": "10Gi", "storageClassName": "fast"},
                "neighbor": {},
                "remote": {
                    "endpoint": "http://minio:9000",
                    "bucket": "checkpoints",
                    "credentialsSecret": "minio",
                },
            },
        ),
    ):
        yield (
            name,
            {
                "apiVersion": api_names.API_VERSION,
                "kind": api_names.KIND,
                "metadata": {"name": "gpt", "namespace": "default"},
                "spec": {
                    "replicas": 2,
                    "processesPerReplica": 1,
                    "checkpoint": checkpoint,
                    "podTemplate": template,
                },
            },
        )


SHARD_VALUES = {
    "step": 41,
    "big": 1 << 60,
    "pair": (1, "two"),
    "none": None,
    "bytes": b"\x00\xff",
    "inside": torch.arange(3, dtype=torch.int16),
}
SHARD_TENSORS = {
    "net.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "net.bias": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
    "odd": torch.arange(5, dtype=torch.uint8),
}


def _shard() -> bytes:
    """A whole shard file of rank 1 that owns a row of one tensor, and all of others."""
    encoded = objects.encode(SHARD_VALUES)
    items = [_item(name, tensor) for name, tensor in SHARD_TENSORS.items()]
    extras = [_item(name, tensor) for name, tensor in encoded.tensors]
    layout = shardfile.Layout(items, 1, extras=extras, aliases={"net.tied": "net.weight"})
    frame = layout.frame(extras, len(encoded.json))
    file = io.BytesIO(bytes(frame.size))
    parts = [(0, frame.header), (frame.blob_start, encoded.json)]
    parts += zip(layout.starts, map(_raw, SHARD_TENSORS.values()), strict=True)
    parts += zip(frame.starts, (_raw(tensor) for _, tensor in encoded.tensors), strict=True)
    for start, data in parts:
        file.seek(start)
        file.write(data)
    return file.getvalue()


def _item(name: str, tensor: torch.Tensor) -> shardfile.Item:
    shape = tuple(tensor.shape)
    offsets = (2, 0) if name == "net.weight" else (0,) * len(shape)
    return shardfile.Item(name, tensor.dtype, shape, offsets)


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _pretty(value: Any) -> bytes:
    text = json.dumps(codec.to_plain(value), indent=1, ensure_ascii=False)
    return f"{text}\n".encode()


def main() -> None:
    """Write the folder of the present version."""
    folder = DATA / names.PROTOCOL_VERSION
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in written().items():
        (folder / name).write_bytes(data)
    print(f"wrote {folder}; look at `git diff` of it")


if __name__ == "__main__":
    main()
