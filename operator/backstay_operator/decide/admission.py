"""Whether a job whose manifest is right can be taken: what the CRD's rules can't see. Pure."""

from __future__ import annotations

from backstay_operator.api import InvalidJob, TrainingJob, memory_too_small, names
from backstay_operator.decide.conditions import Condition


def accepted() -> Condition:
    """The job is taken."""
    return Condition(
        type=names.ACCEPTED,
        status=True,
        reason=names.REASON_ACCEPTED,
        message="the manifest is right and may be carried out",
    )


def refused(error: InvalidJob) -> Condition:
    """The manifest is wrong, or asks for what is not allowed: every problem, a line each."""
    return _no(error.reason, str(error))


def refusal(job: TrainingJob, sidecar_memory: str) -> Condition | None:
    """Why no pods are made of a job, with what to change; None: nothing stands against it."""
    small = memory_too_small(job, sidecar_memory)
    if small:
        return _no(names.REASON_MEMORY_TOO_SMALL, small)
    return None


def _no(reason: str, message: str) -> Condition:
    return Condition(type=names.ACCEPTED, status=False, reason=reason, message=message)
