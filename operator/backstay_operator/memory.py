"""What the operator remembers of a job between two passes, in this process only.

Nothing here is needed to be right: after a restart it is empty, and the same state is reached, a
few seconds later. Observers and the applier share it; one worker has it at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_operator.decide import Flushed, Trouble
from backstay_protocol.messages import LastWord


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is being mended."""

    reason: str
    message: str
    replicas: tuple[int, ...] = ()
    failed_at: float = 0.0
    """Seconds since the epoch; 0: not known."""
    noticed_at: float


@dataclass
class Told:
    """When something was told last, monotonic, and how often it was swallowed since."""

    at: float
    swallowed: int = 0


@dataclass(kw_only=True)
class JobMemory:
    """Of one job, by its uid."""

    uid: str
    token: str = ""
    troubles: tuple[Trouble, ...] = ()
    """What the API server refused in the last pass."""
    flushed: Flushed | None = None
    calm_restarts: dict[str, int] = field(default_factory=dict)
    """Pod uid and container -> restarts when all trained last: later ones are in a row."""
    looked: bool = False
    """Whether there was a pass before."""
    last_words: dict[tuple[int, int], LastWord] = field(default_factory=dict)
    """Replica and generation -> what its sidecar said as it ended, by a watch: such a pod may be
    gone before it is listed again."""
    remote_trouble_since: float = 0.0
    """When the leader first said that the remote tier does not work, since the epoch; 0: it does.
    """
    foreign_budgets: tuple[str, ...] = ()
    budgets_at: float = float("-inf")
    """When other budgets were looked for last, monotonic."""
    heard_at: float = 0.0
    """When the leader answered last, monotonic; 0: never."""
    applied: dict[str, str] = field(default_factory=dict)
    """Object -> digest of what was applied last."""
    applied_at: float = 0.0
    status_at: float = 0.0
    """When status was written last, monotonic."""
    annotated_at: float = 0.0
    annotated: str = ""
    told: dict[tuple[str, str], Told] = field(default_factory=dict)
    """(reason, key) of an Event -> when it was told."""
    failure: Failure | None = None
    """What is being mended."""
    phase: str = ""
    """What the leader said last."""
    interval: tuple[int, int] = (0, 0)
    """Attempt, and the capture interval that its leader was told."""
