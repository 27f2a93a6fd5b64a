"""How the checkpoints that a restore saw, or would see, are told to people."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from backstay_protocol.messages import Candidate


def tell_candidates(candidates: Sequence[Candidate], more: int, *, kept: bool = True) -> None:
    """One line each: taken or not, where it is, why. `kept`: whoever tells knows which ones."""
    if not candidates:
        typer.echo("no checkpoint was in sight" if kept else "nobody kept which ones were in sight")
        return
    typer.echo("checkpoints in sight:")
    for candidate in candidates:
        mark = "taken " if candidate.taken else "not   "
        name = f"step {candidate.checkpoint.step} of attempt {candidate.checkpoint.attempt}"
        if candidate.run:
            name += f" of run {candidate.run}"
        tiers = f" ({', '.join(candidate.tiers)})" if candidate.tiers else ""
        typer.echo(f"  {mark} {name}{tiers}: {candidate.why}")
    if more:
        typer.echo(f"  and {more} older ones")
