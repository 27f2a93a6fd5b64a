"""The member's side of a restore round: what a sidecar promises and stores. Pure.

Called by the sidecar's member with the state that its attempt.json holds; the caller writes the new
state to disk and memory volume *before* it answers. Rules carried here (PROTOCOL.md): promise,
owner, known (the mark "in line"), current.
"""

from __future__ import annotations

from backstay_protocol.messages import PromiseRequest, StoreRequest
from backstay_protocol.records import AttemptState
from backstay_protocol.topology import PodIdentity


def merge(disk: AttemptState | None, memory: AttemptState | None) -> AttemptState:
    """One state from the two volumes: the greater promise, the newer record, the disk's mark."""
    raise NotImplementedError


def promise(
    state: AttemptState, request: PromiseRequest, pod: PodIdentity, *, has_disk: bool = True
) -> tuple[AttemptState, bool, str]:
    """(new state, granted, why). Refuses smaller numbers, and equal ones of another round.

    `has_disk` false (no disk, or a broken one): the state lives in the memory volume alone and the
    pod is never in line.
    """
    raise NotImplementedError


def store(
    state: AttemptState, request: StoreRequest, pod: PodIdentity, *, has_disk: bool = True
) -> tuple[AttemptState, bool, str]:
    """(new state, stored, why). Only what the promise was given for; `ran` only after the record."""
    raise NotImplementedError


def in_line(state: AttemptState, pod: PodIdentity) -> bool:
    """Rule `known`: nothing newer than what this disk knows can have run. Goes into PromiseReply."""
    raise NotImplementedError


def current_attempt(state: AttemptState) -> int:
    """The attempt whose words, orders and copies count here; 0: none (a newer promise was given)."""
    raise NotImplementedError


def heeds(state: AttemptState, attempt: int) -> bool:
    """Whether a word, an order or a copy that was made under `attempt` counts here."""
    raise NotImplementedError
