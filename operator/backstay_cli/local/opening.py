"""Whether a local job begins or goes on: its status at the start of a runner.

The runner calls it with what an earlier one left, and persists the result with its first plan;
nothing is read or written here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from backstay_cli.local import machine
from backstay_cli.local.state import LocalStatus, new_uid
from backstay_operator.api import TrainingJob
from backstay_operator.decide import JobRecord, note_choice


def open_status(
    old: LocalStatus | None, job: TrainingJob, manifest: Path, now: float
) -> LocalStatus:
    """The status of an earlier run, carried on, or a new one."""
    second, choice = int(now), job.spec.restore.choice
    digest = _digest(job)
    if old is not None and old.spec_digest == digest and not old.record.outcome:
        return replace(old, record=note_choice(old.record, choice, second))
    uid = old.uid if old is not None else new_uid()
    generation = second if old is None else max(second, old.record.generation + 1)
    remote = job.spec.checkpoint.remote
    record = JobRecord(
        first_generation=generation,
        generation=generation,
        choice=old.record.choice if old is not None else "",
        choice_number=old.record.choice_number if old is not None else 0,
    )
    return LocalStatus(
        uid=uid,
        job=job.name,
        namespace=job.namespace,
        run=job.run,
        replicas=job.spec.replicas,
        created=now,
        manifest=str(manifest.absolute()),
        spec_digest=digest,
        hosts=machine.hosts_of(uid, job.spec.replicas),
        record=note_choice(record, choice, second, first=old is None),
        nodes=old.nodes if old is not None else (),
        next_node=old.next_node if old is not None else 0,
        bucket=remote.bucket if remote else "",
        prefix=remote.prefix if remote else "",
        region=remote.region if remote else "",
        endpoint=remote.endpoint if remote else "",
        embedded=bool(remote and remote.embedded),
    )


def _digest(job: TrainingJob) -> str:
    """Of the job as it is run: another one is a job that was applied again."""
    return hashlib.sha256(
        json.dumps([job.run, repr(job.spec)], sort_keys=True).encode()
    ).hexdigest()
