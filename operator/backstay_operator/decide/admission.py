"""Whether a job whose manifest is right can be taken: what the CRD's rules can't see. Pure."""

from __future__ import annotations

from collections.abc import Iterator

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
    missing = list(_not_supported(job))
    if missing:
        return _no(names.REASON_NOT_SUPPORTED_YET, "\n".join(missing))
    small = memory_too_small(job, sidecar_memory)
    if small:
        return _no(names.REASON_MEMORY_TOO_SMALL, small)
    return None


def _not_supported(job: TrainingJob) -> Iterator[str]:
    """What the definition takes and nobody carries out: never silently passed over."""
    if job.spec.restore_from is not None:
        yield "spec.restore.from: this version can't begin from another run yet; remove it"
    if job.spec.restore_fresh:
        yield (
            "spec.restore.fresh: this version can't forget a run yet; remove it and give "
            "spec.checkpoint.runName a new name"
        )


def _no(reason: str, message: str) -> Condition:
    return Condition(type=names.ACCEPTED, status=False, reason=reason, message=message)
