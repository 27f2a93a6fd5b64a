"""Waits until a checkpoint has reached a tier, and tells people what it is waiting for.

Called by checkpointer.py in `wait(tier=...)` and at the end of the `with` block. It asks the pod's
own sidecar, which knows the leader's word; one that does not answer is asked again until the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backstay.client import SHORT_SECONDS, SidecarClient
from backstay.restore import Messages
from backstay.schedule import Words
from backstay_protocol.clock import SYSTEM_CLOCK, Clock
from backstay_protocol.control import State, Word
from backstay_protocol.errors import BackstayError
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import JobView
from backstay_protocol.names import REMOTE, URL_JOB

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
OTHERS_PAUSE_SECONDS = 0.5
LEAST_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class Reached:
    """Whether it got there; if not, why, in a sentence."""

    reached: bool
    why: str = ""


def wait_for_tier(
    client: SidecarClient,
    words: Words,
    checkpoint: CheckpointId,
    tier: str,
    timeout_seconds: float,
    say: Callable[[str], None],
    clock: Clock = SYSTEM_CLOCK,
) -> Reached:
    """Until the checkpoint, or a newer one of its attempt, is complete there. Never raises."""
    messages = Messages(say, clock)
    deadline = clock.monotonic() + timeout_seconds
    pause = FIRST_PAUSE_SECONDS
    while True:
        if tier == REMOTE and words[Word.DURABLE_STEP] >= checkpoint.step > 0:
            return Reached(True)
        left = deadline - clock.monotonic()
        answer_seconds = min(max(left / 2, LEAST_ANSWER_SECONDS), SHORT_SECONDS)
        try:
            if _is_in(client, checkpoint, tier, answer_seconds):
                return Reached(True)
            why = _what_holds_it_up(client, tier, answer_seconds)
        except BackstayError as error:
            why = f"the sidecar does not answer: {error}"
        if clock.monotonic() + pause > deadline:
            return Reached(False, why)
        messages(f"waiting for step {checkpoint.step} to be complete in {tier}: {why}")
        clock.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def wait_for_others(
    client: SidecarClient, timeout_seconds: float, clock: Clock = SYSTEM_CLOCK
) -> None:
    """Until every rank of the job has finished. Never raises.

    For ranks beside the leader: their sidecar ends soon after them, and the others would then wait
    in vain for its word.
    """
    deadline = clock.monotonic() + timeout_seconds
    while True:
        try:
            job = client.get(URL_JOB, JobView)
        except BackstayError:
            return
        states = [rank.state for replica in job.replicas for rank in replica.ranks]
        if all(state == State.FINISHED for state in states) or clock.monotonic() > deadline:
            return
        clock.sleep(OTHERS_PAUSE_SECONDS)


def _is_in(client: SidecarClient, checkpoint: CheckpointId, tier: str, seconds: float) -> bool:
    status = client.checkpoint(checkpoint, seconds)
    if status is None:
        return False
    return status.durable if tier == REMOTE else tier in status.complete_in


def _what_holds_it_up(client: SidecarClient, tier: str, seconds: float) -> str:
    state = next((s for s in client.status(seconds).tiers if s.tier == tier), None)
    if state is None:
        return f"the sidecar says nothing of a {tier} tier"
    if not state.ok:
        return state.message or "it is in trouble"
    return f"{state.backlog} shards of this pod wait for it" if state.backlog else "under way"
