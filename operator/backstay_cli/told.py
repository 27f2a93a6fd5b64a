"""What a job's next world would be told about its restore, by its manifest and what is persisted.

Used by `restore --dry-run` where no leader can be asked: a choice by hand counts once per change of
its field, so the manifest alone does not say whether it is still to come.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from backstay_cli.cluster import ClusterJob
from backstay_cli.errors import CommandError
from backstay_cli.find import LocalJob
from backstay_cli.manifest_file import load_job
from backstay_operator.api import Allowances, InvalidJob, TrainingJob, read_job
from backstay_operator.decide import JobRecord, chosen, note_choice
from backstay_operator.persisted import parse_record
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.topology import RestoreOptions


@dataclass(frozen=True, kw_only=True)
class ToldWorld:
    """What the next world goes by."""

    world_size: int = 0
    """0: not known."""
    restore: RestoreOptions = field(default_factory=RestoreOptions)


def told_by_cluster(found: ClusterJob) -> ToldWorld:
    """Of a TrainingJob, with what the operator wrote down."""
    template = found.tree["spec"].get("podTemplate", {}).get("spec", {})
    account = str(template.get("serviceAccountName") or "default")
    anything = Allowances(service_accounts=(account,), host_paths=("/",), privileged=True)
    try:
        job = read_job(found.tree, anything)
    except InvalidJob:
        return ToldWorld()
    return _told(job, parse_record(found.status.get("generations") or {}))


def told_by_folder(found: LocalJob) -> ToldWorld:
    """Of a local job, by its manifest as it is now."""
    with contextlib.suppress(CommandError):
        if found.status.manifest:
            return _told(load_job(Path(found.status.manifest)), found.status.record)
    return ToldWorld()


def _told(job: TrainingJob, record: JobRecord | None) -> ToldWorld:
    first = record is None
    record = record or JobRecord(first_generation=1, generation=1)
    record = note_choice(record, job.spec.restore.choice, SYSTEM_CLOCK.time(), first=first)
    return ToldWorld(world_size=job.world_size, restore=chosen(job.spec.restore, record))
