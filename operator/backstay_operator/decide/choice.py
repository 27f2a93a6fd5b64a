"""When a choice by hand (`spec.restore.step`) was made: each change of the field counts as one.

A choice applies once per token. The same checkpoint chosen again, after the field was away or
different, is another choice, so the token carries a number from what is persisted. Used by control
loop and local runner whenever they see a spec, before they build a pod of it. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from backstay_operator.decide.observed import JobRecord
from backstay_protocol.topology import ManualChoice, RestoreOptions


def note_choice(record: JobRecord, wanted: ManualChoice | None, now: float) -> JobRecord:
    """The record to persist. The same spec seen again changes nothing.

    The number is the time of the change in seconds, so that it grows over records that were lost.
    """
    named = wanted.token if wanted is not None else ""
    if named == record.choice:
        return record
    number = max(record.choice_number + 1, int(now)) if named else record.choice_number
    return replace(record, choice=named, choice_number=number)


def token_of(restore: RestoreOptions, record: JobRecord) -> str:
    """The token of the choice as it was changed last; empty: nothing is chosen by hand."""
    return f"{restore.choice.token}@{record.choice_number}" if restore.choice is not None else ""


def chosen(restore: RestoreOptions, record: JobRecord) -> RestoreOptions:
    """What goes into the topology: the choice with the token of its own change."""
    if restore.choice is None:
        return restore
    return replace(restore, choice=replace(restore.choice, token=token_of(restore, record)))
