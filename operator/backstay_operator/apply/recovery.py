"""From a failure to the first step after it, for status: what failed, what it took. Pure.

The times of three phases: until it was noticed, until all ranks had joined, until they went on.
"""

from __future__ import annotations

from typing import Any

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
            "step": newest.base.step if newest.base is not None else 0,
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
    begun = restore.finished - restore.seconds
    tree: Tree = {
        "time": text_of(failure.noticed_at if failure is not None else begun),
        "reason": failure.reason if failure is not None else "ProcessEnded",
        "message": failure.message if failure is not None else "the ranks began again in place",
        "replicas": list(failure.replicas) if failure is not None else [],
        **times,
    }
    read = [tier for tier in TIERS if restore.bytes_by_tier.get(tier)]
    if read:
        tree["tier"] = read[-1]
    return tree


def _times(restore: RestoreView, failure: Failure | None) -> dict[str, float]:
    times = {"restoreSeconds": round(restore.seconds, 3)}
    if failure is None:
        return times
    joined = restore.finished - restore.seconds
    times["scheduleSeconds"] = round(max(0.0, joined - failure.noticed_at), 3)
    if failure.failed_at:
        times["detectSeconds"] = round(max(0.0, failure.noticed_at - failure.failed_at), 3)
    return times
