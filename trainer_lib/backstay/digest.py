"""xxh3-128 as used in manifests, plans and loads; the sidecar has its own twin."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

DIGEST_BYTES = 16


def digest(chunk: memoryview | bytes) -> str:
    """Hex digest of one chunk, as a manifest carries it."""
    return xxhash.xxh3_128_hexdigest(chunk)


def binary_digest(data: memoryview | bytes) -> bytes:
    """The 16 bytes of a digest."""
    return xxhash.xxh3_128_digest(data)


def fingerprint(digests: Iterable[str]) -> str:
    """Hex digest over the binary digests of a shard's chunks."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(d) for d in digests))


class RunningDigest:
    """A digest over data that comes in pieces."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._state = xxhash.xxh3_128()

    def update(self, data: memoryview | bytes) -> None:
        """Add one piece."""
        self._state.update(data)

    def digest(self) -> bytes:
        """The 16 bytes so far."""
        return self._state.digest()

    def hexdigest(self) -> str:
        """The same as a manifest carries it."""
        return self._state.hexdigest()
