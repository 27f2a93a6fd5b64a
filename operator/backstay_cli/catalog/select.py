"""Which checkpoint a person means: `latest`, a step, or `<step>-<attempt>`. Pure."""

from __future__ import annotations

from backstay_cli.errors import NotFound, UsageError
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import CheckpointList, CheckpointStatus

LATEST = "latest"
_SHOWN = 5


def select(found: CheckpointList, wanted: str, *, uncommitted: bool = True) -> CheckpointStatus:
    """The checkpoint that is meant. `latest` and a bare step mean the one on the lineage.

    `uncommitted` False: only durable ones count. Raises NotFound or UsageError.
    """
    whole = [c for c in found.checkpoints if c.complete_in and (c.durable or uncommitted)]
    if wanted == LATEST:
        return _latest(found, whole, uncommitted)
    if wanted.isdigit():
        return _by_step(found, whole, int(wanted), uncommitted)
    try:
        named = CheckpointId.parse(wanted)
    except ValueError as error:
        raise UsageError(
            f"--step: got {wanted!r}; expected latest, a step or <step>-<attempt>"
        ) from error
    for checkpoint in whole:
        if checkpoint.checkpoint == named:
            return checkpoint
    raise _not_there(found, f"checkpoint {named}", named.step, uncommitted)


def _latest(
    found: CheckpointList, whole: list[CheckpointStatus], uncommitted: bool
) -> CheckpointStatus:
    on_lineage = [c for c in whole if c.on_lineage]
    if not on_lineage:
        raise _not_there(found, "a complete checkpoint on the lineage", None, uncommitted)
    return max(on_lineage, key=lambda c: c.checkpoint)


def _by_step(
    found: CheckpointList, whole: list[CheckpointStatus], step: int, uncommitted: bool
) -> CheckpointStatus:
    at_step = [c for c in whole if c.checkpoint.step == step]
    for checkpoint in at_step:
        if checkpoint.on_lineage:
            return checkpoint
    if at_step:
        names = ", ".join(f"{c.checkpoint.step}-{c.checkpoint.attempt}" for c in at_step)
        raise NotFound(
            f"{found.run}: step {step} is not on the lineage of attempt {found.attempt}: what a "
            "failed attempt saved there never became history",
            f"to take it all the same, name it: --step {names}",
        )
    raise _not_there(found, f"step {step}", step, uncommitted)


def _not_there(found: CheckpointList, what: str, step: int | None, uncommitted: bool) -> NotFound:
    open_ones = [c for c in found.checkpoints if c.complete_in and not c.durable]
    if step is not None:
        open_ones = [c for c in open_ones if c.checkpoint.step == step]
    if not uncommitted and open_ones:
        return NotFound(
            f"{found.run}: {what} has no commit record there; complete without one: "
            f"{_names(open_ones)}",
            "to take it all the same: --uncommitted",
        )
    there = [c for c in found.checkpoints if c.complete_in]
    shown = f"there is: {_names(there)}" if there else "there is no complete checkpoint at all"
    return NotFound(f"{found.run}: {what} is not there", shown)


def _names(checkpoints: list[CheckpointStatus]) -> str:
    shown = [f"{c.checkpoint.step}-{c.checkpoint.attempt}" for c in checkpoints[:_SHOWN]]
    more = len(checkpoints) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
