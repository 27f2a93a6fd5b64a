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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The job is over."""

    succeeded: bool
    reason: str
    message: str


Action = CreatePod | DeletePod


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
