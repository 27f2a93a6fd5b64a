"""What each tier keeps, and when something may go. Pure; used by the leader's duties.

Thinning is decided once, by the leader, for local and neighbor together (rule `further`): tiers
thinned apart can each be whole and together not survive one node. Nothing here deletes; the
leader's word is carried out by sidecars that still hold their promise to the attempt that gave it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from backstay_protocol.history import Lineage
from backstay_protocol.ids import CheckpointId
from backstay_protocol.topology import Retention


def keep(
    checkpoints: Iterable[CheckpointId],
    lineage: Lineage,
    retention: Retention,
    *,
    pinned: Collection[CheckpointId] = (),
    durable: Collection[CheckpointId] = (),
) -> frozenset[CheckpointId]:
    """What a tier keeps of its complete checkpoints.

    The newest `keep_last` on the lineage, those at multiples of `keep_every`, the base of the
    attempt, the pinned ones and the last durable one (`durable` empty: that rule is not asked for).
    """
    history = sorted((c for c in checkpoints if lineage.contains(c)), reverse=True)
    kept = set(history[: retention.keep_last])
    if retention.keep_every:
        kept.update(c for c in history if c.step % retention.keep_every == 0)
    kept.update(_last(durable, lineage))
    if lineage.base is not None:
        kept.add(lineage.base)
    return frozenset(kept.union(pinned))


@dataclass(frozen=True, kw_only=True)
class ThinView:
    """What the leader knows of local and neighbor when it gives the word to thin."""

    lineage: Lineage
    """Of the attempt that runs, and that every member has stored."""
    present: frozenset[CheckpointId]
    """Everything of which any shard lies in local or neighbor, whole or not."""
    in_memory: frozenset[CheckpointId] = frozenset()
    """What lies in slots: it may still come to local and neighbor, or come there again."""
    complete_local: frozenset[CheckpointId] = frozenset()
    complete_neighbor: frozenset[CheckpointId] = frozenset()
    durable: frozenset[CheckpointId] = frozenset()
    has_neighbor: bool = False
    """Whether a neighbor tier is configured and there is another replica."""
    has_remote: bool = False
    retention: Retention
    """Of the local tier; what is held for others follows it."""
    pinned: frozenset[CheckpointId] = frozenset()
    in_transit: frozenset[CheckpointId] = frozenset()
    """Chosen for another tier and not complete there yet."""
    disk_full: bool = False
    """A local disk has no room left: then a newer durable checkpoint makes room as well."""


def thin(view: ThinView) -> tuple[CheckpointId, ...]:
    """Checkpoints that leave local and neighbor now, or need not come there, oldest first.

    Only what is older than a checkpoint on the lineage that is as safe against the loss of a node.
    What a slot still holds is judged as if it had come: else it would be written and thinned again.
    """
    newest = max((c for c in safe(view) if view.lineage.contains(c)), default=None)
    if newest is None:
        return ()
    kept = _kept(view)
    return tuple(
        checkpoint
        for checkpoint in sorted(view.present | view.in_memory)
        if checkpoint.step < newest.step
        and checkpoint not in kept
        and checkpoint not in view.in_transit
        and not (checkpoint in view.in_memory and checkpoint in _kept(view, checkpoint))
    )


def _kept(view: ThinView, *coming: CheckpointId) -> frozenset[CheckpointId]:
    there = view.complete_local.union(coming)
    return keep(there, view.lineage, view.retention, pinned=view.pinned)


def safe(view: ThinView) -> frozenset[CheckpointId]:
    """Rule `further`: what survives a node, asking only for tiers that are configured."""
    if view.has_neighbor:
        both = view.complete_local & view.complete_neighbor
        return both | view.durable if view.disk_full else both
    if view.has_remote:
        return view.durable
    return view.complete_local


def remote_victims(
    present: Iterable[CheckpointId],
    *,
    lineage: Lineage,
    retention: Retention,
    durable: Collection[CheckpointId],
    intents: Collection[CheckpointId] = (),
    pinned: Collection[CheckpointId] = (),
    in_transit: Collection[CheckpointId] = (),
) -> tuple[CheckpointId, ...]:
    """Checkpoints to be deleted from the remote tier, oldest first (each by a `Deletion`).

    `present`: everything with any object there; `durable`: committed; `intents`: deletions begun,
    by this leader or an earlier one: they are finished unless a rule protects the checkpoint.
    """
    certain = [c for c in durable if lineage.contains(c) and c not in intents]
    if not certain:
        return ()
    kept = keep(certain, lineage, retention, pinned=pinned, durable=certain)
    return tuple(
        checkpoint
        for checkpoint in sorted(present)
        if checkpoint.step < max(certain).step
        and checkpoint not in kept
        and checkpoint not in in_transit
    )


def _last(durable: Collection[CheckpointId], lineage: Lineage) -> set[CheckpointId]:
    history = [c for c in durable if lineage.contains(c)]
    return {max(history)} if history else set()
