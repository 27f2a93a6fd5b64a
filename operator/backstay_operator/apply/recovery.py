"""From a failure to the first step after it, for status: what failed, what it took. Pure.

The times of three phases: until it was noticed, until all ranks had joined, until they went on.
"""

from __future__ import annotations

from typing import Any

from backstay_operator.api.names import REASON_HANG, REASON_PROCESS_ENDED
from backstay_operator.apply.status import MOST_RECOVERIES
from backstay_operator.cluster import Tree
from backstay_operator.memory import Failure
from backstay_operator.times import text_of
from backstay_protocol.ids import attempt_for_people
from backstay_protocol.messages import JobView, RestoreView
from backstay_protocol.names import TIERS


def with_restores(
    status: dict[str, Any],
    view: JobView,
    failure: Failure | None,
    first_generation: int,
) -> tuple[dict[str, Any], tuple[RestoreView, ...]]:
    """The status with what the leader restored since it was written last, and those restores."""
    last = int((status.get("lastRestore") or {}).get("attempt") or 0)
    new = tuple(restore for restore in view.restores if restore.attempt > last)
    if not new:
        return status, ()
    newest = new[-1]
    times = _times(newest, failure)
    status = {
        **status,
        "lastRestore": {
            "attempt": newest.attempt,
            "attemptName": attempt_for_people(newest.attempt, first_generation),
            "step": newest.began_at,
            **({"origin": newest.origin} if newest.origin else {}),
            "tiers": {tier: size for tier, size in newest.bytes_by_tier.items() if size},
            "time": text_of(newest.finished),
            **times,
        },
        "restarts": int(status.get("restarts") or 0) + len(new) - (0 if last else 1),
    }
    if last:
        recoveries = [*(status.get("recoveries") or []), _recovery(newest, failure, times)]
        status["recoveries"] = recoveries[-MOST_RECOVERIES:]
    return status, new


def _recovery(restore: RestoreView, failure: Failure | None, times: dict[str, float]) -> Tree:
    begun = restore.stopped or restore.finished - restore.seconds
    tree: Tree = {
        "time": text_of(failure.noticed_at if failure is not None else begun),
        "reason": failure.reason if failure is not None else REASON_PROCESS_ENDED,
        "message": failure.message if failure is not None else "the ranks began again in place",
        "replicas": list(failure.replicas) if failure is not None else [],
        **times,
    }
    read = [tier for tier in TIERS if restore.bytes_by_tier.get(tier)]
    if read:
        tree["tier"] = read[-1]
    return tree


def _times(restore: RestoreView, failure: Failure | None) -> dict[str, float]:
    """Processes that end are noticed by their launcher, which tells nobody when: from the last step
    on counts as schedule.
    """
    joined = restore.joined or restore.finished - restore.seconds
    times = {"restoreSeconds": _seconds(restore.finished - joined)}
    if failure is None or failure.reason == REASON_PROCESS_ENDED:
        began = restore.stopped or (failure.noticed_at if failure is not None else 0.0)
        return times | ({"scheduleSeconds": _seconds(joined - began)} if began else {})
    noticed = min(failure.noticed_at, joined)
    times["scheduleSeconds"] = _seconds(joined - noticed)
    hung = failure.reason == REASON_HANG and restore.stopped
    failed_at = restore.stopped if hung else failure.failed_at or restore.stopped
    if failed_at:
        times["detectSeconds"] = _seconds(noticed - failed_at)
    return times


def _seconds(value: float) -> float:
    return round(max(0.0, value), 3)
