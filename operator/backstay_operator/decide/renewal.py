"""Pods that live and are made anew all the same, since they can't take on what has changed. Pure.

Checks of `replicas`: the spec is another one, the token is, or the choice of what to restore.
"""

from __future__ import annotations

from backstay_operator.api import names
from backstay_operator.decide.case import Case, delete, may_delete
from backstay_operator.decide.choice import chosen
from backstay_operator.decide.plan import Plan
from backstay_operator.manifests.objects import owned_name


def is_outdated(case: Case) -> Plan | None:
    """What a running pod can't take on: all end with a save, then all start anew."""
    observed, record = case.observed, case.record
    size = observed.job.spec.replicas
    outdated = [
        pod
        for pod in observed.pods
        if pod.replica >= size
        or (pod.spec_digest and observed.spec_digest and pod.spec_digest != observed.spec_digest)
    ]
    if not outdated:
        return None
    why = "the job's template or size has changed"
    actions = tuple(
        delete(pod, why, graceful=pod.node_alive) for pod in outdated if may_delete(pod)
    )
    message = f"{why}: {len(outdated)} pods end after a save, then new ones go on from there"
    return Plan(
        record=record, actions=actions, reason=names.REASON_TEMPLATE_CHANGED, message=message
    )


def goes_by_another_token(case: Case) -> Plan | None:
    """New pods would not be let in by the old ones: all end with a save, then all start anew."""
    observed, record = case.observed, case.record
    if not observed.token_refused:
        return None
    why = f"the pods go by another token than the Secret {owned_name(observed.job.name)}"
    actions = tuple(
        delete(pod, why, graceful=pod.node_alive) for pod in observed.currents if may_delete(pod)
    )
    message = f"{why}: all end after a save, then new ones go on from there"
    return Plan(record=record, actions=actions, reason=names.REASON_TOKEN_CHANGED, message=message)


def leader_has_not_heard_of_the_choice(case: Case) -> Plan | None:
    """`spec.restore` was changed under a running job: its next leader carries that out, once.

    A leader reads the choice when its pod begins. The other replicas go on from what it decides,
    in their pods.
    """
    observed, record = case.observed, case.record
    wanted = chosen(observed.job.spec.restore, record).choice
    pod = observed.current(0)
    if wanted is None or pod is None or pod.choice is None or wanted.applied_by(pod.choice):
        return None
    why = "spec.restore has changed"
    actions = (delete(pod, why, graceful=pod.node_alive),) if may_delete(pod) else ()
    message = f"{why}: replica 0 ends after a save, then all begin from what was chosen"
    return Plan(record=record, actions=actions, reason=names.REASON_RESTORE_CHOSEN, message=message)
