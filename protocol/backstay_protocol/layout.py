"""Where things are: memory volume, local disk, keys of the remote tier. Pure strings."""

from __future__ import annotations

import re

from backstay_protocol.ids import CheckpointId, format_attempt, format_rank
from backstay_protocol.names import SOCKET_NAME

SHARD_SUFFIX = ".safetensors"
MANIFEST_SUFFIX = ".json"
BASE_SUFFIX = ".base.json"
EXPLANATION_SUFFIX = ".restore.json"
ATTEMPT_FILE = "attempt.json"
RESTORES_FILE = "restores.json"
DELETED_FILE = "deleted.json"
POLICY_FILE = "policy.json"
PLACEMENT_FILE = "placement.json"
_SHARD_KEY = re.compile(r"checkpoints/(\d+-\d+)/(\d+)\.(safetensors|json)")


class MemoryLayout:
    """The memory-backed volume that one pod's trainer and sidecar share."""

    def __init__(self, root: str) -> None:
        """`root`: where the volume is mounted."""
        self.root = root.rstrip("/")
        self.socket = f"{self.root}/{SOCKET_NAME}"
        self.attempt_file = f"{self.root}/{ATTEMPT_FILE}"
        self.deleted_file = f"{self.root}/{DELETED_FILE}"
        self.policy_file = f"{self.root}/{POLICY_FILE}"
        self.placement_file = f"{self.root}/{PLACEMENT_FILE}"
        self.ranks = f"{self.root}/ranks"

    def rank_folder(self, rank: int) -> str:
        """Folder of one rank, not padded (it holds only this pod's few ranks)."""
        return f"{self.ranks}/{rank}"

    def control(self, rank: int) -> str:
        """The 4 KiB control block."""
        return f"{self.rank_folder(rank)}/control"

    def slot(self, rank: int, slot: int) -> str:
        """A slot's data: never renamed, truncated or re-created."""
        return f"{self.rank_folder(rank)}/slot-{slot}"

    def slot_manifest(self, rank: int, slot: int) -> str:
        """A slot's manifest: there exactly while the slot is whole."""
        return f"{self.slot(rank, slot)}{MANIFEST_SUFFIX}"


class DiskLayout:
    """One replica's folder on its node's disk: `<root>/<namespace>/<run>/replica-<i>/`."""

    def __init__(self, root: str, run: str, replica: int) -> None:
        """`run`: `<namespace>/<run name>`."""
        self.run_folder = f"{root.rstrip('/')}/{run}"
        self.folder = f"{self.run_folder}/replica-{replica}"
        self.attempt_file = f"{self.folder}/{ATTEMPT_FILE}"
        self.deleted_file = f"{self.folder}/{DELETED_FILE}"
        self.restores_file = f"{self.folder}/{RESTORES_FILE}"
        self.shards = f"{self.folder}/shards"
        self.replicas = f"{self.folder}/replicas"

    @staticmethod
    def shard(area: str, checkpoint: CheckpointId, rank: int) -> str:
        """A shard in `area` (self.shards or self.replicas)."""
        return f"{area}/{checkpoint}/{format_rank(rank)}{SHARD_SUFFIX}"

    @staticmethod
    def manifest(area: str, checkpoint: CheckpointId, rank: int) -> str:
        """The manifest beside it."""
        return f"{area}/{checkpoint}/{format_rank(rank)}{MANIFEST_SUFFIX}"


class RemoteLayout:
    """Keys below `<prefix>/<namespace>/<run>/`, with step and attempt: nothing is overwritten."""

    def __init__(self, prefix: str, run: str) -> None:
        """`prefix` may be empty; `run`: `<namespace>/<run name>`."""
        self._prefix = prefix
        self.root = f"{prefix.strip('/')}/{run}/".lstrip("/")
        self.run_record = f"{self.root}run.json"
        self.attempts = f"{self.root}attempts/"
        self.checkpoints = f"{self.root}checkpoints/"
        self.deletions = f"{self.root}deletions/"

    def sibling(self, run: str) -> RemoteLayout:
        """Where another run is, in the same bucket and prefix."""
        return RemoteLayout(self._prefix, run)

    def claim(self, attempt: int) -> str:
        """Claim of an attempt number; conditional create."""
        return f"{self.attempts}{format_attempt(attempt)}.json"

    def base(self, attempt: int) -> str:
        """Lineage record of an attempt; conditional create."""
        return f"{self.attempts}{format_attempt(attempt)}{BASE_SUFFIX}"

    def explanation(self, attempt: int) -> str:
        """What the restore of an attempt saw and why it chose so (messages.RestoreView)."""
        return f"{self.attempts}{format_attempt(attempt)}{EXPLANATION_SUFFIX}"

    def folder(self, checkpoint: CheckpointId) -> str:
        """Everything of one checkpoint."""
        return f"{self.checkpoints}{checkpoint}/"

    def shard(self, checkpoint: CheckpointId, rank: int) -> str:
        """A shard's bytes."""
        return f"{self.folder(checkpoint)}{format_rank(rank)}{SHARD_SUFFIX}"

    def manifest(self, checkpoint: CheckpointId, rank: int) -> str:
        """Its manifest, uploaded after it."""
        return f"{self.folder(checkpoint)}{format_rank(rank)}{MANIFEST_SUFFIX}"

    def commit(self, checkpoint: CheckpointId) -> str:
        """The commit record, written last; conditional create."""
        return f"{self.folder(checkpoint)}commit.json"

    def pin(self, checkpoint: CheckpointId) -> str:
        """Present while a person wants the checkpoint kept."""
        return f"{self.folder(checkpoint)}pin.json"

    def deletion(self, checkpoint: CheckpointId) -> str:
        """The intent to delete; orders, never forbids."""
        return f"{self.deletions}{checkpoint}"

    def parse_shard_key(self, key: str) -> tuple[CheckpointId, int, str] | None:
        """(checkpoint, rank, "safetensors" or "json") of a key below `checkpoints/`, else None."""
        match = _SHARD_KEY.fullmatch(key.removeprefix(self.root))
        if not match:
            return None
        return CheckpointId.parse(match[1]), int(match[2]), match[3]
