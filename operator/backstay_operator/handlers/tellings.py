"""What of a pass people are told by Events. Pure.

Dangerous paths (creation, deletion by force) tell the facts that they were decided on.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch

from backstay_operator.api import names
from backstay_operator.apply.events import NORMAL, WARNING, Telling
from backstay_operator.decide import Condition, CreatePod, DeletePod, Plan, Trouble
from backstay_protocol.messages import RestoreView

_CALM = (names.REASON_FIRST_PODS, names.REASON_SUSPENDED, names.REASON_CREATION_UNFINISHED)


@singledispatch
def tellings_of(what: object, **_: object) -> list[Telling]:
    """Of a plan that was carried out, or of a condition by which a job is refused."""
    raise AssertionError(what)


@tellings_of.register
def _(no: Condition) -> list[Telling]:
    return [Telling(reason=no.reason, action="Refuse", note=no.message, type=WARNING)]


@tellings_of.register
def _(
    plan: Plan,
    *,
    restored: Iterable[RestoreView] = (),
    troubles: Iterable[Trouble] = (),
) -> list[Telling]:
    found = [_trouble(trouble) for trouble in troubles]
    created = [a for a in plan.actions if isinstance(a, CreatePod)]
    deleted = [a for a in plan.actions if isinstance(a, DeletePod)]
    kind = NORMAL if plan.reason in _CALM or plan.outcome is not None else WARNING
    if plan.outcome is not None:
        found.append(_outcome(plan))
    elif deleted:
        found += [_deletion(action, plan, kind) for action in deleted]
    if created:
        replicas = ", ".join(str(action.identity.replica) for action in created[:20])
        note = f"create the pods of {len(created)} replicas ({replicas}): {plan.message}"
        found.append(Telling(reason=plan.reason, action="CreatePods", note=note, type=kind))
    found += [_restore(restore) for restore in restored]
    return found


def _trouble(trouble: Trouble) -> Telling:
    return Telling(reason=trouble.reason, action="Wait", note=trouble.message, type=WARNING)


def _outcome(plan: Plan) -> Telling:
    assert plan.outcome is not None
    name = names.SUCCEEDED if plan.outcome.succeeded else names.FAILED
    kind = NORMAL if plan.outcome.succeeded else WARNING
    return Telling(reason=name, action="End", note=plan.outcome.message, type=kind)


def _deletion(action: DeletePod, plan: Plan, kind: str) -> Telling:
    how = "delete" if action.graceful else "delete by force (nobody answers there)"
    note = f"{how} the pod of replica {action.replica}, generation {action.generation}: "
    return Telling(
        reason=plan.reason,
        action="DeletePod",
        note=note + action.why,
        type=kind,
        key=f"{action.replica}/{action.generation}",
    )


def _restore(restore: RestoreView) -> Telling:
    base = "from nothing" if restore.base is None else f"from step {restore.base.step}"
    if restore.origin:
        base = f"from {restore.origin}"
    read = ", ".join(f"{size} bytes from {tier}" for tier, size in restore.bytes_by_tier.items())
    note = f"all ranks go on {base} after {restore.seconds:.1f} s"
    if read:
        note += f" ({read})"
    if restore.reason:
        note += f": {restore.reason}"
    return Telling(reason="Restored", action="Restore", note=note, key=str(restore.attempt))
