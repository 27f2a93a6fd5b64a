"""`backstay explain-restore`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from backstay_cli.buckets import cluster_bucket, local_bucket
from backstay_cli.candidates import tell_candidates
from backstay_cli.client import SidecarClient
from backstay_cli.errors import CommandError
from backstay_cli.explaining import Search, Told
from backstay_cli.find import LocalJob, choose_job
from backstay_cli.leader import cluster_leader, local_leader
from backstay_cli.output import Format, OutputOption, print_json
from backstay_cli.where import WHERE_HELP, Where, disks_of, named_bucket, store_of
from backstay_operator.api.quantity import format_bytes

HELP = f"""Say what the last restore considered, and why each checkpoint was or was not taken.

    From the leader while the job runs, else after the fact: from the remote tier, where each
    restore is kept beside its attempt, or from a local job's disks. --attempt names another one
    than the last.

    {WHERE_HELP}

    \b
    Examples:
      backstay explain-restore
      backstay explain-restore --attempt 1796000000000002 -n team --job gpt
      backstay explain-restore --bucket models --endpoint https://s3.example.org --run team/gpt
    """


def explain_restore(
    where: Where,
    attempt: Annotated[
        int, typer.Option("--attempt", min=0, help="Which restore; 0: the last one.")
    ] = 0,
    output: OutputOption = Format.TEXT,
) -> None:
    """Explain a restore."""
    search = Search(attempt)
    if where.in_cluster:
        _in_cluster(where, search)
    elif where.address:
        search.leader(SidecarClient(where.address, where.given_token()))
    elif where.bucket:
        search.bucket(named_bucket(where))
    else:
        asyncio.run(_local(choose_job(where.job, where.state_dir, running=None), search))
    found = search.result()
    if output is Format.JSON:
        print_json(found)
    else:
        _tell(found)


def _in_cluster(where: Where, search: Search) -> None:
    with where.cluster_job() as job:
        try:
            if job.runs:
                search.leader(cluster_leader(job))
        except CommandError as error:
            search.cannot(error)
        try:
            if search.found is None:
                search.bucket(cluster_bucket(job, where.endpoint))
        except CommandError as error:
            search.cannot(error)


async def _local(job: LocalJob, search: Search) -> None:
    if job.running:
        search.leader(local_leader(job))
    search.disks(job.status.run, _replica_folders(job))
    if search.found is None:
        async with store_of(job) as endpoint:
            if endpoint:
                search.bucket(local_bucket(job, endpoint))


def _replica_folders(job: LocalJob) -> list[Path]:
    return [
        folder for disk in disks_of(job) for folder in (disk / job.status.run).glob("replica-*")
    ]


def _tell(found: Told) -> None:
    view = found.restore
    if view.base is not None:
        began = f"step {view.base.step} of attempt {view.base.attempt}"
    else:
        began = view.origin or "nothing (step 0)"
    when = datetime.fromtimestamp(view.finished, tz=UTC).astimezone()
    typer.echo(f"{found.run}: attempt {view.attempt} began from {began}")
    lost = f", {view.lost_steps} steps lost" if view.lost_steps >= 0 else ""
    typer.echo(f"  {when:%Y-%m-%d %H:%M:%S}, {view.seconds:.1f} s{lost}; told by {found.source}")
    if view.reason:
        typer.echo(f"  {view.reason}")
    if view.bytes_by_tier:
        parts = (f"{format_bytes(n)} from {tier}" for tier, n in view.bytes_by_tier.items())
        typer.echo(f"  read: {', '.join(parts)}")
    for bad in view.bad:
        typer.echo(f"  struck out: {bad}")
    tell_candidates(view.candidates, view.more_candidates, kept=bool(view.outcome))
