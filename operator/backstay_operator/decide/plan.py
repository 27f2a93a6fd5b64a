"""What to do, with the sentence that says why."""

from __future__ import annotations

from dataclasses import dataclass

from backstay_operator.decide.observed import JobRecord
from backstay_protocol.topology import PodIdentity


@dataclass(frozen=True, kw_only=True)
class CreatePod:
    """Create the current pod of a replica. Its generation is in the record, which is persisted
    before.
    """

    identity: PodIdentity
    near_node: str = ""
    """Where its predecessor's disk is, if that lives; "" elsewhere."""
    why: str


@dataclass(frozen=True, kw_only=True)
class DeletePod:
    """Delete a pod."""

    replica: int
    generation: int
    graceful: bool
    """False: its node is lost; nobody answers."""
    why: str
    flush: bool = False
    """The replica's flush pod is meant."""


@dataclass(frozen=True, kw_only=True)
class CreateFlushPod:
    """Start the sidecar alone beside what a replica's pod left, to bring it out."""

    identity: PodIdentity
    node: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Flush:
    """Ask the leader for one common save to every tier; asked again it is the same save."""

    since: float
    why: str


@dataclass(frozen=True, kw_only=True)
class DeleteJob:
    """Its time to live is over."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The job is over."""

    succeeded: bool
    reason: str
    message: str


Action = CreatePod | DeletePod | CreateFlushPod | Flush | DeleteJob


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Persist `record` if it changed, then carry out `actions` in order."""

    record: JobRecord
    actions: tuple[Action, ...] = ()
    reason: str
    """CamelCase constant of api/names.py."""
    message: str
    outcome: Outcome | None = None
    """Set when this plan ends the job (the record then carries it too)."""
