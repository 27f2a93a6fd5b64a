"""xxh3-128 as used in manifests (the command's twin of the sidecar's module)."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


def digest(chunk: memoryview | bytes) -> str:
    """Hex digest of one chunk."""
    return xxhash.xxh3_128_hexdigest(chunk)


def fingerprint(digests: Iterable[str]) -> str:
    """Hex digest over the binary digests of a shard's chunks."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(d) for d in digests))
