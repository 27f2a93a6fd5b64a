"""`backstay flush`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from backstay_cli.errors import EXIT_FAILED
from backstay_cli.flushing import Flushed, flush
from backstay_cli.leader import leader_of
from backstay_cli.output import Format, OutputOption, print_json
from backstay_cli.where import WHERE_HELP, Where
from backstay_protocol.clock import SYSTEM_CLOCK

FLUSH_HELP = f"""Take one common save now and wait until it is safe in the outermost tier.

    That is the remote tier (then the step is durable), else the neighbors', else the local one.
    Training goes on. Before a maintenance, or before the last pod is taken away. A job in which
    nobody trains saves nothing new: what is complete is waited for. Exit code 1: not in time; the
    save stays ordered and may still become safe.

    {WHERE_HELP}

    \b
    Examples:
      backstay flush
      backstay flush --job my-job --timeout 60
      backstay flush -n team --job gpt -o json
      kubectl backstay flush -n team --job gpt
    """


def flush_command(
    where: Where,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait for it.")
    ] = 300.0,
    output: OutputOption = Format.TEXT,
) -> None:
    """Save now, and wait."""
    console = Console(stderr=True, highlight=False)
    with leader_of(where) as leader:
        if console.is_terminal:
            with console.status("asking for a common save") as line:
                found = flush(leader, timeout, SYSTEM_CLOCK, line.update)
        else:
            found = flush(leader, timeout, SYSTEM_CLOCK, lambda words: typer.echo(words, err=True))
    if output is Format.JSON:
        print_json(found)
    else:
        _tell(found)
    if not found.done:
        raise typer.Exit(EXIT_FAILED)


def _tell(found: Flushed) -> None:
    if found.done:
        typer.echo(f"{found.run}: step {found.step} {_safe(found)} ({found.seconds:.1f} s)")
        return
    wanted = f"step {found.step}" if found.step else "a common save"
    typer.echo(
        f"{found.run}: {wanted} is not complete in {found.tier or 'the outermost tier'} after "
        f"{found.seconds:.0f} s",
        err=True,
    )
    for reason in found.why:
        typer.echo(f"  {reason}", err=True)
    if found.durable_step is not None:
        typer.echo(f"  step {found.durable_step} {_safe(found)}", err=True)
    elif found.tier:
        typer.echo(f"  nothing is complete in {found.tier} yet", err=True)


def _safe(found: Flushed) -> str:
    if found.durable:
        return "is durable"
    return f"is complete in {found.tier}, the outermost tier that this job has"
