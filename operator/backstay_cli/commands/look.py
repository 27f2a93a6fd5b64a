"""`backstay checkpoints` and `backstay status`: looking, without changing anything."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import typer

from backstay_cli.catalog import SidecarCatalog
from backstay_cli.errors import CommandError
from backstay_cli.find import LocalJob, choose_job
from backstay_cli.local.state import LocalStatus
from backstay_cli.output import Format, OutputOption, print_json, print_table
from backstay_cli.where import WHERE_HELP, Where, with_catalog
from backstay_operator.api.quantity import format_bytes
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.errors import Refused, Unreachable
from backstay_protocol.messages import CheckpointList, CheckpointStatus, JobView
from backstay_protocol.names import PORT_API, TIERS

_ATTENDED_SECONDS = 120.0
"""An operator writes within seconds."""
_MESSAGE = 120
"""Characters of a condition that a table shows."""

CHECKPOINTS_HELP = f"""List a run's checkpoints, newest first: where they are complete, how safe.

    {WHERE_HELP}

    \b
    Examples:
      backstay checkpoints
      backstay checkpoints --address 10.0.0.7 -o json
      backstay checkpoints --bucket models --endpoint https://s3.example.org --run team/gpt
    """

STATUS_HELP = f"""Show how a job does: phase, step, attempt, tiers, replicas.

    {WHERE_HELP}

    \b
    Examples:
      backstay status
      backstay status --job my-job -o json
      backstay status --address 10.0.0.7:7070
      backstay status -n team --job gpt
    """


def checkpoints(where: Where, output: OutputOption = Format.TEXT) -> None:
    """List checkpoints."""
    found = with_catalog(where, lambda catalog, cancel: catalog.checkpoints(), reads=False)
    if output is Format.JSON:
        print_json(found)
    else:
        _print_checkpoints(found)


def _print_checkpoints(found: CheckpointList) -> None:
    print_table(
        f"checkpoints of {found.run} (attempt {found.attempt})",
        ("STEP", "ATTEMPT", "COMPLETE IN", "DURABLE", "LINEAGE", "RANKS", "SIZE", "CREATED"),
        [_checkpoint_row(checkpoint) for checkpoint in found.checkpoints],
    )


def _checkpoint_row(status: CheckpointStatus) -> tuple[str, ...]:
    partly = ", ".join(
        f"{tier} {count}/{status.world_size or '?'}"
        for tier, count in status.present_in.items()
        if count and tier not in status.complete_in
    )
    complete = ", ".join(tier for tier in TIERS if tier in status.complete_in)
    return (
        str(status.checkpoint.step),
        str(status.checkpoint.attempt),
        "; ".join(filter(None, [complete, f"({partly})" if partly else ""])) or "-",
        "yes" + (", pinned" if status.pinned else "") if status.durable else "no",
        "on" if status.on_lineage else "off",
        str(status.world_size or "?"),
        format_bytes(status.size),
        _time(status.created),
    )


def _time(seconds: float) -> str:
    if not seconds:
        return "-"
    return datetime.fromtimestamp(seconds, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def status(where: Where, output: OutputOption = Format.TEXT) -> None:
    """Show a job."""
    if where.in_cluster:
        _show_cluster_job(where, output)
        return
    if where.address:
        _show_view(SidecarCatalog(where.address, where.given_token()).job(), output)
        return
    found = choose_job(where.job, where.state_dir, running=None)
    if found.running:
        _show_view(_catalog(found).job(), output)
    elif output is Format.JSON:
        print_json(found.status)
    else:
        _print_stopped(found.status)


def _show_cluster_job(where: Where, output: Format) -> None:
    """What the operator wrote, and what the leader says while it can be reached."""
    with where.cluster_job() as job:
        view = None
        if job.runs:
            try:
                view = SidecarCatalog(job.address(), job.token()).job()
            except (Unreachable, Refused, CommandError) as error:
                typer.echo(
                    f"only what the operator says; its leader can't be asked: {error}", err=True
                )
    if output is Format.JSON:
        print_json({"status": job.status, "job": view})
        return
    conditions = job.status.get("conditions") or []
    print_table(
        f"{job.namespace}/{job.name}: {job.status.get('reason') or 'not seen by the operator yet'}",
        ("CONDITION", "STATUS", "REASON", "MESSAGE"),
        [
            (c["type"], c["status"], c.get("reason", ""), c.get("message", "")[:_MESSAGE])
            for c in conditions
        ],
    )
    if view is not None:
        if left := unattended(job.status, view, SYSTEM_CLOCK.time()):
            typer.echo(left, err=True)
        _show_view(view, output)


def unattended(status: dict[str, Any], view: JobView, now: float) -> str:
    """Why it seems that no operator looks after a job any more; empty: it does not seem so.

    It trains all the same, so that nobody notices before something fails and nothing replaces it.
    """
    durable = view.newest_durable
    known = [t.newest_time for t in view.tiers if t.newest == durable and t.newest_time]
    old = bool(known) and now - max(known) > _ATTENDED_SECONDS
    behind = durable is not None and durable.step > int(status.get("durableStep", -1)) and old
    last = view.restores[-1] if view.restores else None
    missed = (
        last is not None
        and last.attempt > int(status.get("attempt") or 0)
        and now - last.finished > _ATTENDED_SECONDS
    )
    if not behind and not missed:
        return ""
    return (
        "what the operator wrote is old: it is down, or does not look after this namespace (the "
        "chart's value `namespaces`). The job trains on, but lost pods are not replaced"
    )


def _catalog(job: LocalJob) -> SidecarCatalog:
    return SidecarCatalog(f"{job.status.hosts[0]}:{PORT_API}", job.folder.token())


def _print_stopped(found: LocalStatus) -> None:
    record = found.record
    outcome = record.outcome or "stopped before its end; run it again to go on"
    typer.echo(f"{found.namespace}/{found.job}: not running; {outcome}")
    if record.outcome_message:
        typer.echo(f"  {record.outcome_message}")


def _show_view(view: JobView, output: Format) -> None:
    if output is Format.JSON:
        print_json(view)
        return
    typer.echo(f"{view.run}: {view.phase}, step {view.step}, attempt {view.attempt}")
    if view.message:
        typer.echo(f"  {view.message}")
    for warning in view.warnings:
        typer.echo(f"  warning: {warning}")
    now = SYSTEM_CLOCK.time()
    print_table(
        "tiers",
        ("TIER", "NEWEST COMPLETE", "AGE", "BACKLOG", "STATE"),
        [
            (
                tier.tier,
                str(tier.newest.step) if tier.newest else "-",
                f"{max(0.0, now - tier.newest_time):.0f} s" if tier.newest_time else "-",
                str(tier.backlog),
                "well" if tier.ok else tier.message or "not well",
            )
            for tier in view.tiers
        ],
    )
    print_table(
        "replicas",
        ("REPLICA", "ADDRESS", "SEEN", "STEP"),
        [
            (
                str(replica.replica),
                replica.address,
                f"{replica.seen_seconds_ago:.1f} s ago",
                str(min((rank.step for rank in replica.ranks), default="-")),
            )
            for replica in view.replicas
        ],
    )
