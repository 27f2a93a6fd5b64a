from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_protocol.errors import CorruptData, VersionMismatch
from backstay_protocol.ids import CheckpointId
from backstay_protocol.manifest import Manifest, read_manifest


def manifest(**fields: Any) -> Manifest:
    defaults: dict[str, Any] = {
        "run": "ns/run",
        "step": 5,
        "attempt": 3,
        "rank": 1,
        "world_size": 2,
        "replica": 1,
        "plan": "p",
        "size": 20,
        "created": 1.5,
        "chunk_size": 8,
        "chain": ((2, 4),),
        "metadata": {"loss": 0.5},
    }
    return Manifest(**(defaults | fields))


def test_a_manifest_survives_being_written() -> None:
    unsealed = manifest()
    assert read_manifest(unsealed.to_json(), "f") == unsealed
    sealed = unsealed.seal(("a", "b", "c"), "print")
    assert read_manifest(sealed.to_json(), "f") == sealed
    assert (unsealed.sealed, sealed.sealed) == (False, True)
    assert replace(sealed, digests=None, fingerprint="") == unsealed


def test_it_names_its_checkpoint() -> None:
    assert manifest().checkpoint == CheckpointId(5, 3)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_chunks_cover_the_file_without_gaps(size: int, chunk_size: int) -> None:
    shard = manifest(size=size, chunk_size=chunk_size)
    last = shard.num_chunks - 1
    assert shard.chunk(0)[0] == 0
    assert shard.chunk(last)[1] == size
    assert shard.chunk(last)[0] < size
    assert shard.num_chunks == -(-size // chunk_size)
    if last:
        assert shard.chunk(last - 1)[1] == shard.chunk(last)[0]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"size": 0}, "must be positive"),
        ({"chunk_size": 0}, "must be positive"),
        ({"step": -1}, "rank 1 of 2 at step -1"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"digests": ("a",), "fingerprint": "f"}, "1 digests for 3 chunks"),
        ({"digests": ("a", "b", "c")}, "sealed without a fingerprint"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        manifest(**fields)


def test_what_is_not_a_manifest_is_named_by_its_place() -> None:
    with pytest.raises(CorruptData, match=r"slot-0\.json: not a manifest: Manifest: not JSON"):
        read_manifest(b"{", "slot-0.json")
    broken = json.loads(manifest().to_json()) | {"size": 0}
    with pytest.raises(CorruptData, match="must be positive"):
        read_manifest(json.dumps(broken), "f")


def test_a_format_of_another_major_says_what_to_do() -> None:
    later = json.loads(manifest().to_json()) | {"format": "2.0"}
    with pytest.raises(VersionMismatch, match=r"manifest format 2\.0.*a newer one"):
        read_manifest(json.dumps(later), "f")


def test_every_truncation_of_a_manifest_is_noticed() -> None:
    whole = manifest().seal(("a", "b", "c"), "print").to_json()
    for length in range(len(whole)):
        with pytest.raises(CorruptData):
            read_manifest(whole[:length], "f")
