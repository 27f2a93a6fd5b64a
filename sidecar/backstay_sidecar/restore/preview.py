"""What a restore would take now: GET /v1/restore/preview. Used by the leader; begins nothing.

Decides by the very function that rounds use, from what the leader knows and one listing of the
remote tier; nothing is promised, claimed or written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from backstay_protocol import choice
from backstay_protocol.errors import BackstayError
from backstay_protocol.explain import Explanation, explain
from backstay_protocol.history import Chain
from backstay_protocol.messages import RestorePreview
from backstay_protocol.names import REMOTE
from backstay_protocol.origins import run_to_list
from backstay_protocol.records import AttemptRecord
from backstay_protocol.round_events import RemoteView
from backstay_protocol.topology import ManualChoice, Topology
from backstay_sidecar.restore.duties import Duties
from backstay_sidecar.restore.remote_book import RemoteBook

LIST_SECONDS = 60.0


async def preview(
    topology: Topology,
    duties: Duties,
    record: AttemptRecord | None,
    book: RemoteBook | None,
    manual: ManualChoice | None,
) -> RestorePreview:
    """`record`: this sidecar's; `manual`: as if a person had chosen so, else the topology's."""
    records = (record,) if record is not None else ()
    wanted = manual or topology.restore.choice
    remote, trouble = await _look(book, wanted, records)
    found = _explained(topology, duties, records, remote, wanted)
    reason = found.reason
    if trouble and topology.tiers.remote is not None:
        reason += f"; the remote tier could not be listed: {trouble}"
    return RestorePreview(
        run=topology.run,
        attempt=duties.attempt,
        outcome=found.outcome,
        reason=reason,
        checkpoint=found.checkpoint,
        checkpoint_run=found.origin_run,
        candidates=found.candidates,
        more_candidates=found.more,
    )


async def _look(
    book: RemoteBook | None, wanted: ManualChoice | None, records: tuple[AttemptRecord, ...]
) -> tuple[RemoteView | None, str]:
    """One listing, and another where it tells of a run that is needed; or why there is none."""
    if book is None:
        return None, "this sidecar was given no access to it"
    run = run_to_list(wanted, records)
    try:
        async with asyncio.timeout(LIST_SECONDS):
            view = await book.call(lambda book: book.view((run,) if run else ()))
            needed = run_to_list(wanted, (*records, *view.bases))
            if needed and needed != run:
                view = await book.call(lambda book: book.view((needed,)))
            return view, ""
    except TimeoutError:
        return None, f"no answer within {LIST_SECONDS:.0f} s"
    except (BackstayError, OSError) as error:
        return None, str(error)


def _explained(
    topology: Topology,
    duties: Duties,
    records: tuple[AttemptRecord, ...],
    remote: RemoteView | None,
    wanted: ManualChoice | None,
) -> Explanation:
    seen = remote or RemoteView()
    chains: Mapping[int, Chain] = {**duties.census.chains(), **seen.inventory.chains}
    here = tuple(copy for copy in duties.census.copies() if copy.tier != REMOTE)
    view = choice.RestoreView(
        attempt=max((record.attempt for record in records), default=0) + 1,
        world_size=topology.world_size,
        replicas=topology.replicas,
        records=records,
        bases=seen.bases,
        copies=(*here, *seen.inventory.copies),
        chains=chains,
        remote_configured=topology.tiers.remote is not None,
        claimed=remote is not None,
        listed=remote is not None,
        intents=seen.intents,
        others={other.run: other for other in seen.others},
        manual=wanted,
        quarantine_after=topology.restore.quarantine_after,
    )
    return explain(view, choice.choose(view))
