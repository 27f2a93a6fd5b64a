"""`backstay restore`: what a restore would take, and what to write to make it take another one."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, replace
from typing import Annotated

import typer
import yaml

from backstay_cli.candidates import tell_candidates
from backstay_cli.catalog import Catalog, DiskCatalog, select
from backstay_cli.catalog.sight import Sight, bucket_sight
from backstay_cli.cluster import ClusterJob
from backstay_cli.errors import EXIT_FAILED, UsageError
from backstay_cli.find import choose_job
from backstay_cli.leader import cluster_leader, leader_of
from backstay_cli.output import Format, OutputOption, print_json
from backstay_cli.previewing import Previewed, Wanted, ask_leader, from_sight, other_run
from backstay_cli.told import ToldWorld, told_by_cluster, told_by_folder
from backstay_cli.where import WHERE_HELP, Where, disks_of, opened_bucket, with_catalog
from backstay_protocol import codec
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import REFUSE_OUTCOME, RestorePreview

HELP = f"""Say what a restore would take now, or what to write to make it take another one.

    --dry-run asks the leader, which begins nothing; without a living job the same decision is
    computed from the bucket alone (of a stopped local job: its disks, too). With --step what a
    person's choice would give. Exit code 1: a restore would be refused.

    Without --dry-run nothing is changed either: jobs are restored by their manifest. The field to
    change is printed, with the lines to write or to run.

    {WHERE_HELP}

    \b
    Examples:
      backstay restore --dry-run
      backstay restore --dry-run --step 1200 -n team --job gpt
      backstay restore --step 1200 -n team --job gpt
      backstay restore --dry-run --bucket models --endpoint https://s3.example.org --run team/gpt
    """


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """What `-o json` prints without --dry-run."""

    what: str
    """What is restored then."""
    field: str
    manifest: str
    """YAML to write."""
    commands: tuple[str, ...]
    """Lines to run."""


def restore(
    where: Where,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what a restore would take now.")
    ] = False,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Choose this step.")] = None,
    attempt: Annotated[
        int, typer.Option("--attempt", min=0, help="Of this attempt; 0: on the lineage.")
    ] = 0,
    other: Annotated[
        str, typer.Option("--from", help="Another run's checkpoint: NAMESPACE/RUN NAME.")
    ] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start from nothing.")] = False,
    output: OutputOption = Format.TEXT,
) -> None:
    """Preview or prepare a restore."""
    if attempt and step is None:
        raise UsageError("--attempt needs --step", "name a checkpoint by both")
    if fresh and (other or step is not None):
        raise UsageError("--fresh excludes --from and --step", "it starts from nothing")
    if other and other.count("/") != 1:
        raise UsageError(f"--from: got {other!r}; expected NAMESPACE/RUN NAME")
    wanted = Wanted(step=-1 if step is None else step, attempt=attempt, run=other, fresh=fresh)
    if dry_run:
        _preview(where, wanted, output)
    elif wanted == Wanted():
        raise UsageError(
            "nothing to prepare: a job restores the newest checkpoint on its lineage by itself",
            "see what that is: backstay restore --dry-run; choose another one: --step N",
        )
    else:
        _instruct(where, wanted, output)


# --- what would be taken -------------------------------------------------------------------------


def _preview(where: Where, wanted: Wanted, output: Format) -> None:
    found = _previewed(where, wanted)
    if output is Format.JSON:
        print_json(found)
    else:
        _tell(found)
    if found.preview.outcome == REFUSE_OUTCOME:
        raise typer.Exit(EXIT_FAILED)


def _previewed(where: Where, wanted: Wanted) -> Previewed:
    if where.bucket:
        return asyncio.run(_without_leader(where, wanted, ToldWorld()))
    if where.in_cluster:
        return _in_cluster(where, wanted)
    if not where.address:
        job = choose_job(where.job, where.state_dir, running=None)
        if not job.running:
            return asyncio.run(_without_leader(where, wanted, told_by_folder(job)))
    with leader_of(where) as leader:
        return Previewed(source="the leader", preview=ask_leader(leader, wanted))


def _in_cluster(where: Where, wanted: Wanted) -> Previewed:
    with where.cluster_job() as job:
        if job.runs:
            leader = cluster_leader(job)
            return Previewed(source="the leader", preview=ask_leader(leader, wanted))
        told = told_by_cluster(job)
    return asyncio.run(_without_leader(where, wanted, told))


async def _without_leader(where: Where, wanted: Wanted, told: ToldWorld) -> Previewed:
    sight, run, sources, others = Sight(), where.run, [], []
    local = None
    if not where.bucket and not where.in_cluster:
        local = choose_job(where.job, where.state_dir, running=None)
        run = local.status.run
        sight = DiskCatalog(disks_of(local), run).sight()
        sources.append("its disks")
    if local is None or local.status.embedded or local.status.endpoint:
        async with opened_bucket(where) as found:
            run = found.run
            sight = sight.with_other(bucket_sight(found.bucket, found.layout, run))
            if other := other_run(sight, wanted, told):
                layout = found.layout.sibling(other)
                others.append(bucket_sight(found.bucket, layout, other).as_other(other))
            sources.append(str(found.bucket))
    preview = from_sight(run, sight, wanted, told, others)
    source = f"{' and '.join(sources)} alone; no leader was asked"
    return Previewed(source=source, preview=preview)


def _tell(found: Previewed) -> None:
    preview = found.preview
    typer.echo(f"{preview.run}: a restore now would {_outcome(preview)}")
    typer.echo(f"  {preview.reason}")
    typer.echo(f"  told by {found.source}")
    tell_candidates(preview.candidates, preview.more_candidates)


def _outcome(preview: RestorePreview) -> str:
    if preview.checkpoint is not None:
        of = f" of run {preview.checkpoint_run}" if preview.checkpoint_run else ""
        name = f"step {preview.checkpoint.step} of attempt {preview.checkpoint.attempt}{of}"
        return f"take {name}"
    return "be refused" if preview.outcome == REFUSE_OUTCOME else "start from nothing, at step 0"


# --- what to write -------------------------------------------------------------------------------


def _instruct(where: Where, wanted: Wanted, output: Format) -> None:
    if not wanted.run and not wanted.fresh:
        wanted = _looked_up(where, wanted)
    told = _instruction(where, wanted)
    if output is Format.JSON:
        print_json(told)
        return
    typer.echo(f"to restore {told.what}, set {told.field}:")
    typer.echo(f"\n{told.manifest}\n")
    for command in told.commands:
        typer.echo(command)


def _looked_up(where: Where, wanted: Wanted) -> Wanted:
    """With the attempt of the checkpoint that is there. Raises NotFound."""
    named = f"{wanted.step}-{wanted.attempt}" if wanted.attempt else str(wanted.step)

    def work(catalog: Catalog, _: threading.Event) -> CheckpointId:
        return select(catalog.checkpoints(), named).checkpoint

    checkpoint = with_catalog(where, work, reads=False)
    return replace(wanted, attempt=checkpoint.attempt)


def _instruction(where: Where, wanted: Wanted) -> Instruction:
    field = "spec.restore of the TrainingJob"
    manifest = yaml.safe_dump({"spec": {"restore": wanted.field}}, sort_keys=False).strip()
    if where.in_cluster:
        with where.cluster_job() as job:
            commands = _patches(job, wanted)
    elif where.address:
        assert wanted.choice is not None
        field = "restore.choice of the topology file (with an operator: spec.restore of the job)"
        choice = codec.to_plain(replace(wanted.choice, token=f"by hand: {_what(wanted)}"))
        manifest = json.dumps({"restore": {"choice": choice}})
        commands = ("# then start the sidecars anew: a choice applies once per token",)
    elif where.bucket:
        commands = ("# then apply or run the job that goes on with this run",)
    else:
        found = choose_job(where.job, where.state_dir, running=None)
        commands = (f"backstay local run {found.status.manifest or 'MANIFEST'}",)
        if found.running:
            commands = ("# stop the run that is under way (Ctrl-C), then", *commands)
    return Instruction(what=_what(wanted), field=field, manifest=manifest, commands=commands)


def _what(wanted: Wanted) -> str:
    if wanted.fresh:
        return "nothing (a start at step 0)"
    step = f"step {wanted.step}" if wanted.step >= 0 else "the newest durable checkpoint"
    attempt = f" of attempt {wanted.attempt}" if wanted.attempt else ""
    return f"{step}{attempt}{f' of run {wanted.run}' if wanted.run else ''}"


def _patches(job: ClusterJob, wanted: Wanted) -> tuple[str, ...]:
    """A job that runs is begun anew by the operator, one that does not when it is resumed."""
    there = (job.tree["spec"].get("restore") or {}).keys()
    earlier = {name: None for name in ("step", "attempt", "from", "fresh") if name in there}
    body = json.dumps({"spec": {"restore": earlier | wanted.field}}, separators=(",", ":"))
    return (f"kubectl -n {job.namespace} patch tj {job.name} --type merge -p '{body}'",)
