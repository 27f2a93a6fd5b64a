"""The library's errors, all below the protocol's BackstayError.

BackstayError
├── MisuseError            the Checkpointer was called in an order that can't work
├── UnsupportedValue       what can't be carried in state or metadata (names it and the way out)
└── RestoreFailed          the world can't begin; training must not start
    ├── SidecarSilent      no answer from the sidecar within the bound
    ├── StructureMismatch  the checkpoint holds other tensors than the script
    └── WorldSizeChanged   per-rank state was saved by another number of ranks

None of them is raised once training has begun, except MisuseError: Backstay's own trouble never
stops a run (docs/guarantees.md, 5).
"""

from __future__ import annotations

from backstay_protocol.errors import BackstayError


class MisuseError(BackstayError):
    """The script's mistake: what was called, what was expected before it, what to change."""


class UnsupportedValue(BackstayError):
    """A value of the state or the metadata can't be saved. Names it, its type and the way out."""


class RestoreFailed(BackstayError):
    """The ranks can't begin: the reason, and what to do about it."""


class SidecarSilent(RestoreFailed):
    """The sidecar did not answer in time; names the socket and the last error."""


class StructureMismatch(RestoreFailed):
    """Names, shapes or types in the checkpoint are not those of the live state. Names them all."""


class WorldSizeChanged(RestoreFailed):
    """State that each rank keeps for itself can't be given to another number of ranks."""
