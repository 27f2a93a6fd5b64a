"""When something was seen broken, what it was and since when: for the account of a recovery. Pure.

Kept in the job's memory until the leader has restored; a restarted operator begins anew and then
tells less of that one recovery.
"""

from __future__ import annotations

from dataclasses import replace

from backstay_operator.api.names import REASON_CONTAINER_ENDED, REASON_HANG, REASON_PROCESS_ENDED
from backstay_operator.decide import CreatePod, DeletePod, Plan
from backstay_operator.memory import Failure, JobMemory
from backstay_operator.observe.reader import Seen
from backstay_protocol.messages import ReplicaView

_BEGINNING = ("Joining", "Restoring")


def note_failure(
    memory: JobMemory, seen: Seen, plan: Plan, *, now: float, monotonic: float
) -> None:
    """Remember what is being mended, from the first sign of it."""
    trained_before = bool((seen.tree.get("status") or {}).get("lastRestore"))
    if not trained_before or plan.record.outcome or seen.observed.job.spec.suspend:
        return
    found = _of_pods(memory, seen, plan, now, monotonic) or _of_ranks(memory, seen, now)
    if found is None:
        return
    known = memory.failure
    if known is None:
        memory.failure = found
    elif (
        known.reason in (REASON_PROCESS_ENDED, REASON_CONTAINER_ENDED)
        and found.reason != REASON_PROCESS_ENDED
    ):
        memory.failure = replace(
            found,
            noticed_at=known.noticed_at,
            failed_at=known.failed_at or min(found.failed_at, known.noticed_at),
        )


def _of_pods(
    memory: JobMemory, seen: Seen, plan: Plan, now: float, monotonic: float
) -> Failure | None:
    replicas = sorted(
        {a.identity.replica for a in plan.actions if isinstance(a, CreatePod)}
        | {a.replica for a in plan.actions if isinstance(a, DeletePod) and not a.flush}
    )
    if not replicas:
        return None
    silent = [v.seen_seconds_ago for v in _views(seen) if v.replica in replicas]
    if 0 in replicas and memory.heard_at:
        silent.append(monotonic - memory.heard_at)
    return Failure(
        reason=plan.reason,
        message=plan.message,
        replicas=tuple(replicas),
        failed_at=now - max(silent) if silent else 0.0,
        noticed_at=now,
    )


def _of_ranks(memory: JobMemory, seen: Seen, now: float) -> Failure | None:
    """Pods live, but ranks begin again: a process or a container ended."""
    ended = [p for p in seen.observed.pods if p.trainer.failed and p.trainer.ended is not None]
    begins = seen.view is not None and seen.view.phase in _BEGINNING
    if ended:
        at = min(p.trainer.ended.at for p in ended if p.trainer.ended is not None)
        return Failure(
            reason=REASON_CONTAINER_ENDED,
            message=f"the trainer of replica {ended[0].replica} ended",
            replicas=tuple(p.replica for p in ended),
            failed_at=at,
            noticed_at=now,
        )
    if not begins or memory.phase != "Training":
        return None
    hang, quiet = seen.observed.job.spec.hang_seconds, seen.view.quiet_seconds if seen.view else 0.0
    if 0 < hang <= quiet:
        return Failure(
            reason=REASON_HANG,
            message=f"no rank had made a step for {quiet:.0f} s; ranks left and began again",
            failed_at=now - quiet,
            noticed_at=now,
        )
    return Failure(
        reason=REASON_PROCESS_ENDED, message="ranks began again in place", noticed_at=now
    )


def _views(seen: Seen) -> tuple[ReplicaView, ...]:
    return seen.view.replicas if seen.view is not None else ()
