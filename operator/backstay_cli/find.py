"""Which local job is meant: by name, by state folder, or because only one runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from backstay_cli.errors import CommandError, NotFound, UsageError
from backstay_cli.local.state import LocalStatus, StateFolder, known_jobs

_SHOWN = 6


@dataclass(frozen=True)
class LocalJob:
    """A job that was run on this machine."""

    folder: StateFolder
    status: LocalStatus
    running: bool

    @property
    def name(self) -> str:
        """`<namespace>/<name>`."""
        return f"{self.status.namespace}/{self.status.job}"


def local_jobs() -> list[LocalJob]:
    """All whose status can be read."""
    found = []
    for known in known_jobs():
        with contextlib.suppress(CommandError):
            job = _open(StateFolder(Path(known.state_dir)))
            if job is not None:
                found.append(job)
    return found


def choose_job(name: str, state_dir: Path | None, *, running: bool | None) -> LocalJob:
    """The job that is meant. `running`: True or False: only such; None: running ones first.

    Raises NotFound (none fits) or UsageError (several do; it names them).
    """
    if state_dir is not None:
        job = _open(StateFolder(state_dir))
        if job is None:
            raise NotFound(f"{state_dir}: no local job was run there")
        candidates = [job]
    else:
        candidates = [job for job in local_jobs() if _named(job, name)]
    fitting = [job for job in candidates if running is None or job.running is running]
    if running is None and any(job.running for job in fitting):
        fitting = [job for job in fitting if job.running]
    if len(fitting) == 1:
        return fitting[0]
    kind = {True: "running ", False: "stopped ", None: ""}[running]
    if not fitting:
        raise _none_fits(name, kind, local_jobs())
    choices = _listed([f"{job.name} ({job.folder.root})" for job in fitting])
    raise UsageError(f"several {kind}local jobs: {choices}", "name one with --job or --state-dir")


def _none_fits(name: str, kind: str, others: list[LocalJob]) -> NotFound:
    what = f"no {kind}local job" + (f" named {name}" if name else "")
    there = _listed([f"{j.name} ({'running' if j.running else 'stopped'})" for j in others])
    return NotFound(what, f"there is: {there}" if there else "start one: backstay local run FILE")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _named(job: LocalJob, name: str) -> bool:
    return not name or name in (job.name, job.status.job)


def _open(folder: StateFolder) -> LocalJob | None:
    status = folder.read()
    return LocalJob(folder, status, folder.is_running()) if status is not None else None
