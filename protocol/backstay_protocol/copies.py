"""What an inventory says of a shard, by its manifest or its checkpoint's commit record. Pure.

Used wherever a tier is listed: by the sidecar's tiers and book of attempts, and by the command for
disks and buckets without a sidecar.
"""

from __future__ import annotations

from backstay_protocol.manifest import Manifest
from backstay_protocol.messages import ShardCopy
from backstay_protocol.names import REMOTE
from backstay_protocol.records import CommitRecord

NO_HOLDER = -1
"""Of copies in the remote tier: no replica holds them."""


def copy_of(manifest: Manifest, tier: str, holder: int = NO_HOLDER) -> ShardCopy:
    """Of a sealed shard."""
    return ShardCopy(
        checkpoint=manifest.checkpoint,
        rank=manifest.rank,
        tier=tier,
        holder=holder,
        world_size=manifest.world_size,
        plan=manifest.plan,
        size=manifest.size,
        chunk_size=manifest.chunk_size,
        fingerprint=manifest.fingerprint,
    )


def committed_copies(commit: CommitRecord) -> list[ShardCopy]:
    """In the remote tier: a commit record speaks for the manifests of all its shards."""
    return [
        ShardCopy(
            checkpoint=commit.checkpoint,
            rank=shard.rank,
            tier=REMOTE,
            holder=NO_HOLDER,
            world_size=commit.world_size,
            plan=commit.plan,
            size=shard.size,
            chunk_size=commit.chunk_size,
            fingerprint=shard.fingerprint,
        )
        for shard in commit.shards
    ]
