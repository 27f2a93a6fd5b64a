"""`backstay pull` and `backstay verify`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from backstay_cli.catalog import LATEST, Catalog, select
from backstay_cli.check import (
    GOOD,
    LAG_SECONDS,
    CopyVerdict,
    Verdict,
    verify_everywhere,
    verify_folder,
)
from backstay_cli.errors import NoAnswer, NotFound, UsageError
from backstay_cli.fetch import Pulled, fetch
from backstay_cli.output import Format, OutputOption, print_json, print_table
from backstay_cli.rotation import replaced_by
from backstay_cli.where import WHERE_HELP, Where, with_catalog
from backstay_operator.api.quantity import format_bytes
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.ids import CheckpointId

PULL_HELP = f"""Copy a checkpoint into a folder, every chunk verified, all or nothing.

    The folder is readable by stock safetensors and by torch's HuggingFaceStorageReader, without
    Backstay. `latest` and a bare step mean the checkpoint on the lineage: what a failed attempt
    saved off it is taken only by its full name. From a bucket only checkpoints with a commit
    record are taken, unless --uncommitted.

    {WHERE_HELP}

    \b
    Examples:
      backstay pull --step latest --out ./checkpoint
      backstay pull --step 1200 --out ./step-1200 --job my-job
      backstay pull --out ./checkpoint -n team --job gpt
      backstay pull --out ./checkpoint --bucket models --endpoint https://s3.example.org
        --run team/gpt
    """

VERIFY_HELP = f"""Check every chunk against its digest, in a pulled folder or in all copies.

    With a folder: that folder. Else all copies of one checkpoint, in every tier and on every
    replica, are read (nothing is written). Exit code 4: a copy is corrupt; 3: one is missing.
    A copy that made room for a newer checkpoint meanwhile is `rotated`, which is no loss; `latest`
    then goes on with the newer one.

    {WHERE_HELP}

    \b
    Examples:
      backstay verify ./checkpoint
      backstay verify --step latest
      backstay verify --step 1200 --job my-job -o json
    """

StepOption = Annotated[str, typer.Option("--step", help="latest, a step, or STEP-ATTEMPT.")]
UncommittedOption = Annotated[
    bool, typer.Option("--uncommitted", help="From a bucket: take one without a commit record.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=1, max=64, help="Reading at once.")]


_TRIES = 5
"""A job that saves many times a second replaces what is being read."""


class _Replaced(NotFound):
    """A newer checkpoint took its place while it was read."""

    def __init__(self, checkpoint: CheckpointId, newer: CheckpointId) -> None:
        super().__init__(
            f"step {checkpoint.step} made room for step {newer.step} while it was read",
            "pull it from a tier that keeps it longer, or take --step latest",
        )


def pull(
    where: Where,
    out: Annotated[Path, typer.Option("--out", help="The folder to make.")],
    step: StepOption = "latest",
    uncommitted: UncommittedOption = False,
    threads: ThreadsOption = 8,
    output: OutputOption = Format.TEXT,
) -> None:
    """Pull a checkpoint."""

    def once(catalog: Catalog, cancel: threading.Event) -> Pulled:
        found = catalog.checkpoints()
        status = select(found, step, uncommitted=uncommitted or not catalog.committed_only)
        with _progress(output) as bar:
            task = bar.add_task(f"step {status.checkpoint.step}", total=status.size or None)
            try:
                return fetch(
                    catalog,
                    status,
                    found.run,
                    out.absolute(),
                    progress=lambda done, total: bar.update(
                        task, completed=done, total=max(total, status.size)
                    ),
                    cancel=cancel,
                    threads=threads,
                )
            except (NotFound, NoAnswer) as error:
                newer = _newer(catalog, status.checkpoint)
                if newer is None:
                    raise
                raise _Replaced(status.checkpoint, newer) from error

    def work(catalog: Catalog, cancel: threading.Event) -> Pulled:
        for _ in range(_TRIES - 1 if step == LATEST else 0):
            try:
                return once(catalog, cancel)
            except _Replaced as replaced:
                typer.echo(f"{replaced.message}: skipped", err=True)
        return once(catalog, cancel)

    pulled = with_catalog(where, work)
    if output is Format.JSON:
        print_json(pulled)
    else:
        _tell_pulled(pulled, out)


def _newer(catalog: Catalog, checkpoint: CheckpointId) -> CheckpointId | None:
    """What took its place, if anything did; a leader may list it for a moment longer."""
    newer = replaced_by(checkpoint, catalog.checkpoints())
    if newer is None:
        SYSTEM_CLOCK.sleep(LAG_SECONDS)
        newer = replaced_by(checkpoint, catalog.checkpoints())
    return newer


def _progress(output: Format) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=output is Format.JSON or not console.is_terminal,
        transient=True,
    )


def _tell_pulled(pulled: Pulled, out: Path) -> None:
    tiers = ", ".join(f"{format_bytes(n)} from {tier}" for tier, n in pulled.bytes_by_tier.items())
    typer.echo(
        f"{out}: step {pulled.checkpoint.step} of attempt {pulled.checkpoint.attempt}, "
        f"{pulled.world_size} shards, {format_bytes(pulled.size)}, verified ({tiers})"
    )
    for bad in pulled.bad_copies:
        typer.echo(f"  a corrupt copy was passed over: {bad}", err=True)


def verify(
    where: Where,
    folder: Annotated[Path | None, typer.Argument(help="A pulled folder.")] = None,
    step: StepOption = "",
    threads: ThreadsOption = 8,
    output: OutputOption = Format.TEXT,
) -> None:
    """Verify a checkpoint."""
    elsewhere = where != Where(token=where.token)
    if folder is not None and (step or elsewhere):
        raise UsageError("give a folder, or --step and where to look; not both")
    if folder is not None:
        verdict = verify_folder(folder, _ignore)
    else:
        verdict = with_catalog(
            where, lambda catalog, cancel: _verified(catalog, step or LATEST, cancel, threads)
        )
    if output is Format.JSON:
        print_json(verdict)
    else:
        _tell_verdict(verdict)
    raise typer.Exit(verdict.exit_code)


def _verified(catalog: Catalog, step: str, cancel: threading.Event, threads: int) -> Verdict:
    """Of `latest` the next one where a newer one took its place while it was read."""
    for left in reversed(range(_TRIES)):
        chosen = select(catalog.checkpoints(), step)
        verdict = verify_everywhere(catalog, chosen, _ignore, cancel=cancel, threads=threads)
        if step != LATEST or not verdict.replaced or not left:
            break
        typer.echo(
            f"step {chosen.checkpoint.step} made room for a newer one while it was read: skipped",
            err=True,
        )
    return verdict


def _ignore(copy: CopyVerdict) -> None:
    """All of them are told together."""


def _tell_verdict(verdict: Verdict) -> None:
    print_table(
        f"step {verdict.checkpoint.step} of attempt {verdict.checkpoint.attempt}",
        ("RANK", "TIER", "VERDICT", "SIZE", "WHERE"),
        [
            (
                str(copy.rank),
                copy.tier or "-",
                copy.verdict,
                format_bytes(copy.size) if copy.size else "-",
                copy.where,
            )
            for copy in verdict.copies
        ],
    )
    bad = [copy for copy in verdict.copies if copy.verdict != GOOD]
    for copy in bad:
        typer.echo(f"rank {copy.rank}: {copy.verdict}: {copy.why}", err=True)
    good = len(verdict.copies) - len(bad)
    typer.echo(f"{good} of {len(verdict.copies)} copies are good, every chunk verified")
