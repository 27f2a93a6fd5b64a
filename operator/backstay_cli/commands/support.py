"""`backstay support-bundle`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from backstay_cli.bundle import Bundle, Index, Limits, Masker, gather
from backstay_cli.bundle.gather import about, own_version
from backstay_cli.credentials import secrets_of_environment
from backstay_cli.errors import UsageError
from backstay_cli.output import Format, OutputOption, print_json
from backstay_cli.where import WHERE_HELP, Where
from backstay_operator.api.quantity import format_bytes
from backstay_protocol.clock import SYSTEM_CLOCK

HELP = f"""Gather all that explains a job's trouble into one file, without its secrets.

    Of a TrainingJob: itself, its pods, Events, nodes, logs (also of the containers before a
    restart), the operator's pods, settings and logs. Of any job: what leader and sidecars say,
    checkpoints, metrics, keys and sizes in the remote tier, versions. Of a local one: state folder
    and logs. Never a byte of a checkpoint.

    Tokens, S3 keys, data of Secrets and values whose names look like a secret's are masked. Read
    what the training script wrote into its logs before you hand it on.

    index.json says what is in it; MISSING has a line for each part that could not be had.

    {WHERE_HELP}

    \b
    Examples:
      backstay support-bundle --out trouble.tar.gz
      backstay support-bundle --out trouble.tar.gz -n team --job gpt
      backstay support-bundle --out trouble.tar.gz --job my-job -o json
    """


def support_bundle(
    where: Where,
    out: Annotated[Path, typer.Option("--out", help="The file to make (.tar.gz).")],
    pods: Annotated[
        int, typer.Option("--pods", min=1, max=1000, help="Pods to look into; sick ones first.")
    ] = Limits.pods,
    log_mib: Annotated[
        int, typer.Option("--log-mib", min=1, max=100, help="Of each log, its last MiB.")
    ] = Limits.log_bytes >> 20,
    output: OutputOption = Format.TEXT,
) -> None:
    """Make a bundle."""
    if out.exists():
        raise UsageError(f"--out: {out} exists", "name a new file, or remove it")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out: there is no folder {out.absolute().parent}")
    limits = Limits(pods=pods, log_bytes=log_mib << 20)
    bundle = Bundle(about(where), Masker(secrets_of_environment()), limits)
    asyncio.run(gather(where, bundle))
    index = bundle.index(SYSTEM_CLOCK.time(), own_version())
    bundle.write(out.absolute(), index)
    if output is Format.JSON:
        print_json(index)
    else:
        _tell(index, out)


def _tell(index: Index, out: Path) -> None:
    size = format_bytes(out.stat().st_size)
    typer.echo(f"{out}: {index.about}, {len(index.files)} files, {size}")
    for line in index.missing:
        typer.echo(f"  missing: {line}")
