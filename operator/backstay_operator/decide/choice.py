"""When a choice by hand (`spec.restore.step`) was made: each change of the field counts as one.

A choice applies once per token. The same checkpoint chosen again, after the field was away or
different, is another choice, so its token carries a number from what is persisted. Used by control
loop and local runner whenever they see a spec, before they build a pod of it. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from backstay_operator.decide.observed import JobRecord
from backstay_protocol.topology import ManualChoice, RestoreOptions


def note_choice(
    record: JobRecord, wanted: ManualChoice | None, now: float, *, first: bool = False
) -> JobRecord:
    """The record to persist. The same spec seen again changes nothing.

    The number is the time of the change in seconds, so that no two changes share one. `first`: the
    job is seen for the first time, or its status was lost. Then nothing was changed, and there is
    no number: a job that is deleted and applied again is not thrown back to what it began from.
    """
    named = wanted.token if wanted is not None else ""
    if named == record.choice:
        return record
    number = record.choice_number
    if named and not first:
        number = max(number + 1, int(now))
    return replace(record, choice=named, choice_number=number)


def chosen(restore: RestoreOptions, record: JobRecord) -> RestoreOptions:
    """What goes into the topology: the choice with the token of its own change."""
    if restore.choice is None:
        return restore
    number = f"@{record.choice_number}" if record.choice_number else ""
    token = f"{restore.choice.token}{number}"
    return replace(restore, choice=replace(restore.choice, token=token))
