"""The member's side of a restore round: what a sidecar promises and stores. Pure.

Called by the sidecar's member with the state that its attempt.json holds; the caller writes the new
state to disk and memory volume *before* it answers. Rules carried here
(tests/support/protocol_rules.py): promise, owner, known (the mark "in line"), current.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from backstay_protocol.history import newest_record
from backstay_protocol.messages import PromiseRequest, StoreRequest
from backstay_protocol.records import AttemptRecord, AttemptState
from backstay_protocol.topology import PodIdentity


def merge(disk: AttemptState | None, memory: AttemptState | None) -> AttemptState:
    """One state from the two volumes: the greater promise, the newer record, the disk's mark.

    They differ after a crash between the two writes, and when a pod starts on an old disk.
    """
    states = [state for state in (disk, memory) if state is not None]
    if not states:
        return AttemptState()
    promised = max(states, key=lambda state: state.promised)
    return AttemptState(
        promised=promised.promised,
        round=promised.round,
        record=newest_record(s.record for s in states if s.record is not None),
        in_line=disk.in_line if disk is not None else 0,
    )


def promise(
    state: AttemptState, request: PromiseRequest, pod: PodIdentity, *, has_disk: bool = True
) -> tuple[AttemptState, bool, str]:
    """(new state, granted, why). Refuses smaller numbers, and equal ones of another round.

    `has_disk` false (no disk, or a broken one): the state lives in the memory volume alone and the
    pod is never in line.
    """
    why = (
        _not_a_member(pod, request.members)
        or _replaced_pod_among(request.members, pod)
        or _outbid(state, request)
    )
    if why:
        return state, False, why
    promised = replace(
        state,
        promised=request.attempt,
        round=request.round,
        in_line=pod.generation if has_disk and in_line(state, pod) else 0,
    )
    return promised, True, f"attempt {request.attempt} is promised"


def store(
    state: AttemptState, request: StoreRequest, pod: PodIdentity, *, has_disk: bool = True
) -> tuple[AttemptState, bool, str]:
    """(new state, stored, why). Only what was promised; the go-ahead only after the record."""
    record = request.record
    why = _not_promised(state, request) or _not_in_order(state.record, record)
    if why:
        return state, False, why
    if state.record == replace(record, ran=True):
        return state, True, f"the go-ahead of attempt {record.attempt} was stored before"
    stored = replace(state, record=record, in_line=pod.generation if has_disk else 0)
    what = "go-ahead" if record.ran else "base"
    return stored, True, f"the {what} of attempt {record.attempt} is stored"


def in_line(state: AttemptState, pod: PodIdentity) -> bool:
    """Rule `known`: nothing newer than what this disk knows can have run. Goes into PromiseReply.

    True when the disk's mark is this pod's, or the pod's that it directly replaced. A bare topology
    has no generations and is never in line.
    """
    return state.in_line > 0 and state.in_line in (pod.generation, pod.replaces)


def current_attempt(state: AttemptState) -> int:
    """The attempt whose words, orders and copies count here; 0: none.

    None while a newer promise waits for its record: the older attempt's world is over by then.
    """
    if state.record is None or state.record.attempt < state.promised:
        return 0
    return state.record.attempt


def heeds(state: AttemptState, attempt: int) -> bool:
    """Whether a word, an order or a copy that was made under `attempt` counts here."""
    return attempt > 0 and attempt == current_attempt(state)


def replaced_pods(members: Mapping[int, int], current: Mapping[int, int]) -> list[int]:
    """Rule `current`: replicas whose pod is not the one that was current when the newest began.

    `members`: replica -> generation of a world; `current`: what its newest pod was given.
    """
    return [
        replica
        for replica, generation in sorted(members.items())
        if current.get(replica, generation) != generation
    ]


# --- checks, each a sentence or "" ----------------------------------------------------------------


def _not_a_member(pod: PodIdentity, members: Mapping[int, int]) -> str:
    if members.get(pod.replica) == pod.generation:
        return ""
    return (
        f"the round is for generation {members.get(pod.replica)} of replica {pod.replica}; "
        f"this pod is generation {pod.generation}"
    )


def _replaced_pod_among(members: Mapping[int, int], pod: PodIdentity) -> str:
    """The newest pod of a world knows which others were current when it was created."""
    if pod.generation < max(members.values()):
        return ""
    replaced = replaced_pods(members, pod.current)
    if not replaced:
        return ""
    return f"the world contains a replaced pod of replica {replaced[0]}"


def _outbid(state: AttemptState, request: PromiseRequest) -> str:
    """Rules `promise` and `owner`."""
    known = max(state.promised, state.record.attempt if state.record else 0)
    if request.attempt > known:
        return ""
    if request.attempt == state.promised and request.round == state.round:
        return ""  # the same question again: its answer was lost
    return f"attempt {known} is promised or stored here; {request.attempt} comes too late"


def _not_promised(state: AttemptState, request: StoreRequest) -> str:
    if (request.record.attempt, request.round) == (state.promised, state.round):
        return ""
    return (
        f"attempt {request.record.attempt} of round {request.round} is not what was promised here "
        f"(attempt {state.promised} of round {state.round or 'none'})"
    )


def _not_in_order(stored: AttemptRecord | None, record: AttemptRecord) -> str:
    """The record first, then the same record with its go-ahead."""
    if stored is not None and stored.attempt > record.attempt:
        return f"attempt {stored.attempt} is stored here; {record.attempt} comes too late"
    known = None if stored is None else replace(stored, ran=False)
    if stored is not None and stored.attempt == record.attempt:
        same = known == replace(record, ran=False)
        return "" if same else f"attempt {record.attempt} is stored here with another base"
    if record.ran:
        return f"the go-ahead of attempt {record.attempt} came before its base"
    return ""
