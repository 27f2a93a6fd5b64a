"""The values (not tensors) of a checkpoint: own ones, or those of all saved ranks after a change.

Called by load.py. Every rank saves a complete set of its own values, so a rank reads its own shard
only, unless the number of ranks changed: then a value is taken if all saved ranks had the same,
merged if the Stateful can, and otherwise an error or, on the user's wish, left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch

from backstay import objects
from backstay.capture import RNG_KEY
from backstay.digest import binary_digest
from backstay.errors import WorldSizeChanged
from backstay.scatter import Piece, Targets
from backstay.shard_reader import Shard
from backstay_protocol.errors import CorruptData
from backstay_protocol.names import rank_name

OnWorldChange = Literal["error", "reset"]
MERGE = "merge_state_dicts"


class SavedObjects:
    """Reads the objects blobs of the base's shards."""

    def __init__(self, shards: Mapping[int, Shard], own_rank: int) -> None:
        """`own_rank`: the saved rank whose values this rank takes over."""
        self._shards = shards
        self._own_rank = own_rank
        self._blobs: dict[int, bytes] = {}

    def own(self) -> dict[str, Any]:
        """Values of this rank. Raises NoSource, CorruptData."""
        return self._decode(self._own_rank)

    def by_rank(self) -> dict[int, dict[str, Any]]:
        """Every saved rank's values. Raises NoSource, CorruptData."""
        return {rank: self._decode(rank) for rank in sorted(self._shards)}

    def owns(self, name: str, keys: Collection[str]) -> bool:
        """Whether a saved tensor is part of a value. `keys`: of the live values."""
        if name in objects.tensor_names(self._blob(self._own_rank)):
            return True
        return any(name.startswith(f"{k}.") and not name.startswith(f"{k}.state.") for k in keys)

    def _blob(self, rank: int) -> bytes:
        if rank not in self._blobs:
            shard = self._shards[rank]
            self._blobs[rank] = bytes(shard.read(*shard.index().objects))
        return self._blobs[rank]

    def _decode(self, rank: int) -> dict[str, Any]:
        blob, shard = self._blob(rank), self._shards[rank]
        tensors, pieces = {}, []
        for name in objects.tensor_names(blob):
            entries = shard.index().entries
            entry = entries.get(name) or entries.get(rank_name(rank, name))
            if entry is None:
                raise CorruptData(f"shard {rank} has no tensor {name}, which its values name")
            tensor = tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            if tensor.numel():
                pieces.append(Piece(entry.start, entry.shape, (0,) * tensor.ndim, tensor))
        shard.fill(Targets(pieces, shard.chunk_size))
        return objects.decode(blob, tensors)


def keep_or_merge(
    by_rank: Mapping[int, Mapping[str, Any]],
    entries: Mapping[str, Any],
    on_world_change: OnWorldChange,
    change: str,
) -> tuple[dict[str, Any], list[str]]:
    """Values for a rank of another world, and a sentence for each that is left as it is.

    `change`: "4 ranks to 2", for the error. Raises WorldSizeChanged naming every value that the
    saved ranks had each for itself and that nothing can merge.
    """
    values: dict[str, Any] = {}
    left, stuck = [], []
    ranks = sorted(by_rank)
    for key in dict.fromkeys(key for rank in ranks for key in by_rank[rank]):
        saved = [by_rank[rank][key] for rank in ranks if key in by_rank[rank]]
        merge = getattr(find(entries, key), MERGE, None)
        if len(saved) == len(ranks) and len({_fingerprint(value) for value in saved}) == 1:
            values[key] = saved[0]
        elif callable(merge):
            values[key] = merge(saved)
        elif on_world_change == "reset":
            left.append(
                f"{_for_people(key)}: another one on each saved rank, left as the script made it"
            )
        else:
            stuck.append(_for_people(key))
    if stuck:
        raise WorldSizeChanged(
            f"the world changed from {change}, and each saved rank had its own {', '.join(stuck)}. "
            f"Restore with as many ranks as before; or give these entries a method "
            f"{MERGE}(list of every saved rank's state_dict()) that returns what this rank's "
            'load_state_dict() shall get; or pass Checkpointer(on_world_change="reset") to begin '
            "anew with them (random numbers and data order then differ from an undisturbed run)"
        )
    return values, left


def find(entries: Mapping[str, Any], path: str) -> Any:
    """The thing that a value's key names in the user's (nested) entries; None if there is none."""
    if path in entries:
        return entries[path]
    thing: Any = entries
    for part in path.split("."):
        if isinstance(thing, Mapping):
            thing = thing.get(part)
        elif isinstance(thing, (list, tuple)) and part.isdigit() and int(part) < len(thing):
            thing = thing[int(part)]
        else:
            return None
    return thing


def _for_people(key: str) -> str:
    return "random number generators" if key == RNG_KEY else key


def _fingerprint(value: Any) -> bytes:
    encoded = objects.encode({"value": value})
    digests = [
        binary_digest(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
        for _, tensor in encoded.tensors
        if tensor.numel()
    ]
    return binary_digest(b"".join([encoded.json, *digests]))
