"""A run's checkpoints made without any trainer: plain safetensors, sealed manifests, records.

For tests of the command: the same checkpoints laid out on disks of local nodes and in a bucket.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from minio import Minio
from safetensors.numpy import save

from backstay_cli.digest import digest, fingerprint
from backstay_cli.local.state import LocalStatus, NodeRecord, StateFolder
from backstay_operator.decide import JobRecord
from backstay_protocol import codec
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import DiskLayout, RemoteLayout
from backstay_protocol.manifest import Manifest
from backstay_protocol.records import (
    AttemptFile,
    AttemptRecord,
    AttemptState,
    CommitRecord,
    CommitShard,
)

RUN = "team/plain"
CHUNK_BYTES = 4096
WORLD = 2
DEAD, LIVE = 1_000_001, 1_000_002  # LIVE started from step 20 of DEAD
CHAIN = ((DEAD, 20),)


def tensors(step: int, rank: int) -> dict[str, np.ndarray]:
    """Rank r keeps rows r*3 .. r*3+3 of a 6 x 1000 matrix; every value encodes its step."""
    rows = np.arange(3000, dtype=np.float32).reshape(3, 1000) + rank * 3000
    return {"model.weight": rows + step * 100_000}


def shard(step: int, rank: int) -> bytes:
    """A plain safetensors file as any tool would write it, with where its rows belong."""
    offsets = {"model.weight": {"saved_offsets": [rank * 3, 0]}}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets)}
    return bytes(save(tensors(step, rank), metadata=metadata))


def manifest(checkpoint: CheckpointId, rank: int) -> Manifest:
    """Its sealed manifest."""
    data = shard(checkpoint.step, rank)
    unsealed = Manifest(
        run=RUN,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        rank=rank,
        world_size=WORLD,
        replica=rank,
        plan="plan-1",
        size=len(data),
        created=1.0,
        chain=CHAIN if checkpoint.attempt == LIVE else (),
        chunk_size=CHUNK_BYTES,
        metadata={"epoch": checkpoint.step},
    )
    spans = (unsealed.chunk(index) for index in range(unsealed.num_chunks))
    digests = tuple(digest(data[start:stop]) for start, stop in spans)
    return unsealed.seal(digests, fingerprint(digests))


CHECKPOINTS = (
    CheckpointId(10, DEAD),
    CheckpointId(20, DEAD),
    CheckpointId(30, DEAD),  # off the lineage: LIVE left DEAD at 20
    CheckpointId(25, LIVE),
    CheckpointId(35, LIVE),
)


@dataclass
class PlainRun:
    """A stopped local job whose disks hold the checkpoints."""

    folder: Path
    uid: str = "11111111-plain"
    checkpoints: tuple[CheckpointId, ...] = CHECKPOINTS
    state: StateFolder = field(init=False)

    def __post_init__(self) -> None:
        self.state = StateFolder(self.folder / "state")
        self.state.root.mkdir(parents=True)
        self.state.write(
            LocalStatus(
                uid=self.uid,
                job="plain",
                namespace="team",
                run=RUN,
                replicas=WORLD,
                created=1.0,
                manifest="",
                spec_digest="",
                hosts={0: "127.99.99.100", 1: "127.99.99.101"},
                record=JobRecord(first_generation=1, generation=1),
                nodes=tuple(NodeRecord(name=f"node-{i}", replica=i) for i in range(WORLD)),
            )
        )
        for rank in range(WORLD):
            disk = self.disk(rank)
            Path(disk.folder).mkdir(parents=True, exist_ok=True)
            record = AttemptRecord(attempt=LIVE, base=CheckpointId(20, DEAD), chain=CHAIN)
            AttemptFile(disk.attempt_file).write(AttemptState(promised=LIVE, record=record))
            for checkpoint in self.checkpoints:
                self.put(disk.shards, checkpoint, rank)
                self.put(self.disk(1 - rank).replicas, checkpoint, rank)

    def disk(self, replica: int) -> DiskLayout:
        """A replica's folder on its node's disk."""
        return DiskLayout(str(self.state.disk(f"node-{replica}")), RUN, replica)

    @staticmethod
    def put(area: str, checkpoint: CheckpointId, rank: int) -> None:
        """One shard with its manifest."""
        path = Path(DiskLayout.shard(area, checkpoint, rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shard(checkpoint.step, rank))
        Path(DiskLayout.manifest(area, checkpoint, rank)).write_bytes(
            manifest(checkpoint, rank).to_json()
        )


def flip(path: Path, offset: int = 9000) -> None:
    """One bit rots."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def upload(client: Minio, bucket: str, prefix: str = "") -> RemoteLayout:
    """The same in a bucket; step 35 has no commit record yet, rank 1 of step 10 is gone."""
    layout = RemoteLayout(prefix, RUN)
    base = AttemptRecord(attempt=LIVE, base=CheckpointId(20, DEAD), chain=CHAIN)
    put(client, bucket, layout.base(LIVE), codec.dumps(base))
    for checkpoint in CHECKPOINTS:
        manifests = [manifest(checkpoint, rank) for rank in range(WORLD)]
        for one in manifests:
            if (checkpoint.step, one.rank) != (10, 1):
                data = shard(checkpoint.step, one.rank)
                put(client, bucket, layout.shard(checkpoint, one.rank), data)
                put(client, bucket, layout.manifest(checkpoint, one.rank), one.to_json())
        if checkpoint.step != 35:
            put(client, bucket, layout.commit(checkpoint), codec.dumps(commit(manifests)))
    return layout


def commit(manifests: list[Manifest]) -> CommitRecord:
    """Says that the checkpoint is durable."""
    return CommitRecord(
        checkpoint=manifests[0].checkpoint,
        world_size=WORLD,
        plan=manifests[0].plan,
        chunk_size=CHUNK_BYTES,
        chain=manifests[0].chain,
        shards=tuple(
            CommitShard(rank=m.rank, size=m.size, fingerprint=m.fingerprint) for m in manifests
        ),
        created=2.0,
    )


def put(client: Minio, bucket: str, key: str, data: bytes) -> None:
    """One object."""
    client.put_object(bucket_name=bucket, object_name=key, data=io.BytesIO(data), length=len(data))
