"""The leader's work in the remote tier between two restores.

One loop: sign of life, late claim and base, listing, commits and adoptions, retention, pins. It
writes what it learns into `Duties.remote`; what may be done is decided by the protocol's commit and
retention. Every pass may fail at any call and is repeated; a greater claim stops everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from backstay_protocol import commit as rules
from backstay_protocol.clock import Clock
from backstay_protocol.completeness import CompleteCheckpoint, complete_in
from backstay_protocol.errors import BackstayError
from backstay_protocol.faults import fault
from backstay_protocol.history import lineage_of
from backstay_protocol.ids import CheckpointId
from backstay_protocol.names import REMOTE
from backstay_protocol.records import AttemptRecord, Claim
from backstay_protocol.retention import remote_victims
from backstay_protocol.topology import Topology
from backstay_sidecar.restore.deletion import delete
from backstay_sidecar.restore.duties import Duties, RemoteKnown
from backstay_sidecar.restore.ports import Emit
from backstay_sidecar.restore.remote_book import (
    BEAT_SECONDS,
    ClaimTaken,
    RemoteBook,
    trouble_code,
)
from backstay_sidecar.restore.signals import Changes

R = TypeVar("R")
PASS_SECONDS = 2.0
LISTING_SECONDS = 60.0
LIFT_SECONDS = 3600.0
SWEEP_SECONDS = 86_400.0
CALL_SECONDS = 120.0
BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0)
SETTLE_SECONDS = 0.1
"""Shards come in crowds; one look does for many."""
YOUNG_SECONDS = 600.0
"""An uncommitted checkpoint of the running attempt is taken to be on its way for so long."""


class RemoteDuties:
    """One per leader with a remote tier."""

    def __init__(
        self,
        *,
        topology: Topology,
        book: RemoteBook,
        duties: Duties,
        clock: Clock,
        emit: Emit,
        learned: Callable[[], None],
        resting: Callable[[], bool],
        round_of: Callable[[int], str],
        sweep: Callable[[], int] | None = None,
    ) -> None:
        """`learned`: something changed in `duties.remote`. `resting`: a round is under way.
        `round_of`: the name of an attempt's round, empty if it is not known (any more). `sweep`
        throws away old unfinished uploads; it blocks and says how many.
        """
        assert topology.tiers.remote is not None
        self._owner = topology.owner
        self._book = book
        self._duties = duties
        self._clock = clock
        self._emit = emit
        self._learned = learned
        self._resting = resting
        self._round_of = round_of
        self._sweep = sweep
        self._swept_at = float("-inf")
        self._swept_for = 0
        self._changes = Changes()
        self._poked = False
        self._fails = 0
        self._beat_at = float("-inf")
        self._listed_at = float("-inf")
        self._listed_for = 0
        self._lifted_at = float("-inf")
        self._seen: dict[CheckpointId, float] = {}
        self._pins: list[tuple[bool, CheckpointId]] = []

    def poke(self) -> None:
        """Something may be there to be committed: look at once."""
        self._poked = True
        self._changes.notify()

    def pin(self, checkpoint: CheckpointId, keep: bool) -> None:
        """Carry a pin into the remote tier, or take it out."""
        self._pins.append((keep, checkpoint))
        self.poke()

    async def run(self) -> None:
        """For as long as the sidecar lives."""
        while True:
            wait = PASS_SECONDS
            if self._fails:
                wait = BACKOFF_SECONDS[min(self._fails, len(BACKOFF_SECONDS)) - 1]
            await self._changes.until(lambda: self._poked and not self._fails, wait)
            await asyncio.sleep(SETTLE_SECONDS)
            self._poked = False
            if not self._duties.attempt or self._resting():
                continue
            try:
                await self.pass_once()
            except (BackstayError, OSError, TimeoutError) as error:
                self._failed(error)
            else:
                self._worked()

    async def pass_once(self) -> None:
        """Everything once, in this order. Raises what the store said."""
        now = self._clock.monotonic()
        if now - self._beat_at >= BEAT_SECONDS:
            await self._call(lambda book: book.own())
            self._beat_at = now
        await self._list(now)
        if self._duties.superseded:
            return
        await self._claim_late()
        await self._carry_pins()
        await self._commit()
        await self._retire()
        await self._lift_intents(now)
        await self._abort_stale_uploads(now)

    # --- knowing ------------------------------------------------------------------------------

    async def _list(self, now: float) -> None:
        attempt = self._duties.attempt
        if self._listed_for == attempt and now - self._listed_at < LISTING_SECONDS:
            return
        record = self._duties.record
        assert record is not None
        known = await self._call(lambda book: _look(book, record))
        self._know(known)
        self._listed_at, self._listed_for = now, attempt
        for checkpoint in known.keys:
            self._seen.setdefault(checkpoint, now)

    def _know(self, known: RemoteKnown) -> None:
        if known != self._duties.remote:
            self._duties.remote = known
            self._learned()

    def _standing(self, record: AttemptRecord) -> rules.Standing:
        known = self._duties.remote
        return rules.Standing(
            lineage=lineage_of(record),
            claims=known.claims,
            base_recorded=known.base_recorded,
            commits=frozenset(known.commits),
            intents=known.intents,
        )

    async def _claims(self) -> None:
        claims = await self._call(lambda book: book.claims())
        self._know(replace(self._duties.remote, claims=frozenset(claims)))

    # --- claim and base -----------------------------------------------------------------------

    async def _claim_late(self) -> None:
        """An attempt that began without the remote tier takes its place there now.

        Raises ClaimTaken if another world has it: then nothing of this attempt goes there.
        """
        record = self._duties.record
        assert record is not None
        attempt = record.attempt
        name = self._round_of(attempt)
        if self._duties.remote.base_recorded or not name:
            return
        await self._claims()
        if self._duties.superseded:
            return
        claim = Claim(attempt=attempt, round=name, owner=self._owner, created=self._clock.time())
        standing = await self._call(lambda book: book.claim(claim))
        if standing is None:
            self._emit("claimed_late", attempt=attempt)
        elif (standing.round, standing.owner) != (name, self._owner):
            raise _taken(standing, "claimed")
        await self._claims()
        if not self._duties.superseded:
            base = await self._call(lambda book: book.write_base(replace(record, ran=False)))
            if not _same_history(base, record):
                raise _taken(claim, "given another base")
            self._know(replace(self._duties.remote, base_recorded=True))

    # --- pins ---------------------------------------------------------------------------------

    async def _carry_pins(self) -> None:
        while self._pins:
            keep, checkpoint = self._pins[0]
            if keep:
                await self._call(partial(RemoteBook.pin, checkpoint=checkpoint))
            else:
                await self._call(partial(RemoteBook.unpin, checkpoint=checkpoint))
            pins = self._duties.remote.pins
            changed = pins | {checkpoint} if keep else pins - {checkpoint}
            self._know(replace(self._duties.remote, pins=changed))
            del self._pins[0]

    # --- commits ------------------------------------------------------------------------------

    async def _commit(self) -> None:
        """Mark what is complete and not marked: uploaded now, or left so by an older leader."""
        record = self._duties.record
        assert record is not None
        whole = self._whole()
        standing, unwanted = self._standing(record), self._duties.unwanted
        waiting = [
            c for c in whole if c not in unwanted and rules.may_commit(c, whole, standing).allowed
        ]
        if not waiting:
            return
        await self._claims()
        for checkpoint in sorted(waiting, reverse=True):
            if rules.may_commit(checkpoint, whole, self._standing(record)).allowed:
                await self._mark(whole[checkpoint], record)

    def _whole(self) -> dict[CheckpointId, CompleteCheckpoint]:
        """Complete in the remote tier, and not contradicted by a copy that a sidecar holds.

        What nobody here has uploaded is judged by the sealed manifests in the bucket: one plan and
        world, and each object as large as its manifest says. Its bytes are not read again: a
        manifest is written after them, and whoever loads checks every chunk.
        """
        census = self._duties.census
        remote = {(c.checkpoint, c.rank): c for c in self._duties.remote.copies}
        remote.update({(c.checkpoint, c.rank): c for c in census.uploaded()})
        whole = complete_in(remote.values(), REMOTE)
        doubtful = {
            copy.checkpoint
            for copy in census.copies()
            if (there := remote.get((copy.checkpoint, copy.rank))) is not None
            and (there.size, there.fingerprint) != (copy.size, copy.fingerprint)
        }
        return {c: found for c, found in whole.items() if c not in doubtful}

    async def _mark(self, whole: CompleteCheckpoint, record: AttemptRecord) -> None:
        checkpoint = whole.checkpoint
        chains = {**self._duties.remote.chains, **self._duties.census.chains()}
        chain = (
            record.chain
            if checkpoint.attempt == record.attempt
            else chains.get(checkpoint.attempt, ())
        )
        commit = rules.commit_record(whole, chain, self._clock.time())
        fault("commit.before")
        await self._call(lambda book: book.commit(commit))
        fault("commit.after")
        known = self._duties.remote
        self._know(
            replace(
                known,
                commits={**known.commits, checkpoint: commit},
                keys={checkpoint: (), **known.keys},
            )
        )
        self._emit(
            "durable", checkpoint=str(checkpoint), adopted=checkpoint.attempt != record.attempt
        )

    # --- retention ----------------------------------------------------------------------------

    async def _retire(self) -> None:
        """Delete what retention and people let go, one checkpoint a pass."""
        record, known = self._duties.record, self._duties.remote
        assert record is not None
        victims = remote_victims(
            known.keys,
            lineage=lineage_of(record),
            retention=self._duties.retention(REMOTE),
            durable=known.commits,
            intents=known.intents,
            pinned=self._duties.pinned(),
            in_transit=self._in_transit(record),
        )
        unwanted = [c for c in self._duties.unwanted if c in known.keys]
        for checkpoint in (*victims, *unwanted)[:1]:
            await self._delete(checkpoint, record)
        if victims[1:]:
            self._poked = True

    def _in_transit(self, record: AttemptRecord) -> set[CheckpointId]:
        known, now = self._duties.remote, self._clock.monotonic()
        uploading = {copy.checkpoint for copy in self._duties.census.uploaded()}
        young = {
            c
            for c in known.keys
            if c.attempt == record.attempt and now - self._seen.get(c, now) < YOUNG_SECONDS
        }
        return {c for c in uploading | young if c not in known.commits and c not in known.intents}

    async def _delete(self, checkpoint: CheckpointId, record: AttemptRecord) -> None:
        loop, wall = asyncio.get_running_loop(), self._clock.time()

        def intended(name: CheckpointId) -> None:
            loop.call_soon_threadsafe(self._intended, name)

        ended = await self._call(
            lambda book: delete(book, checkpoint, record.attempt, wall, intended)
        )
        if ended.stopped:
            self._emit("delete_stopped", checkpoint=str(checkpoint), message=ended.why)
            await self._claims()
            return
        known = self._duties.remote
        self._know(
            replace(
                known,
                commits={c: r for c, r in known.commits.items() if c != checkpoint},
                keys={c: k for c, k in known.keys.items() if c != checkpoint},
                copies=tuple(c for c in known.copies if c.checkpoint != checkpoint),
                pins=known.pins - {checkpoint},
            )
        )
        self._emit("deleted", checkpoint=str(checkpoint), tier=REMOTE)

    def _intended(self, checkpoint: CheckpointId) -> None:
        known = self._duties.remote
        self._know(replace(known, intents=known.intents | {checkpoint}))

    async def _lift_intents(self, now: float) -> None:
        if now - self._lifted_at < LIFT_SECONDS:
            return
        known, wall = self._duties.remote, self._clock.time()
        empty = [c for c in known.intents if c not in known.keys]
        spent = await self._call(lambda book: _lift(book, empty, wall))
        self._know(replace(self._duties.remote, intents=known.intents - set(spent)))
        self._lifted_at = now

    async def _abort_stale_uploads(self, now: float) -> None:
        """About daily, and once for each attempt: who began them may never come back."""
        attempt = self._duties.attempt
        sweep = self._sweep
        if sweep is None or (self._swept_for == attempt and now - self._swept_at < SWEEP_SECONDS):
            return
        self._swept_at, self._swept_for = now, attempt
        try:
            count = await self._call(lambda _: sweep())
        except (BackstayError, OSError, TimeoutError) as error:
            self._emit("sweep_failed", message=str(error) or type(error).__name__)
            return
        if count:
            self._emit("uploads_aborted", count=count)

    # --- calls --------------------------------------------------------------------------------

    async def _call(self, work: Callable[[RemoteBook], R]) -> R:
        async with asyncio.timeout(CALL_SECONDS):
            return await self._book.call(work)

    def _failed(self, error: BaseException) -> None:
        self._fails += 1
        text = str(error) or f"the remote tier did not answer within {CALL_SECONDS:.0f} s"
        if self._duties.remote.trouble != text:
            self._emit("remote_trouble", message=text)
            code = trouble_code(error)
            self._know(replace(self._duties.remote, trouble=text, trouble_code=code))

    def _worked(self) -> None:
        if self._fails:
            self._emit("remote_works")
        self._fails = 0
        self._know(replace(self._duties.remote, trouble="", trouble_code=""))


def _taken(claim: Claim, how: str) -> ClaimTaken:
    return ClaimTaken(
        f"attempt {claim.attempt} was {how} in the remote tier by another world (round "
        f"{claim.round or 'unknown'} of {claim.owner or 'unknown'}): nothing of this attempt goes "
        "there; the next one takes another number"
    )


def _same_history(one: AttemptRecord, other: AttemptRecord) -> bool:
    return (one.base, one.chain, one.origin) == (other.base, other.chain, other.origin)


def _look(book: RemoteBook, record: AttemptRecord) -> RemoteKnown:
    listing = book.listing()
    bases = book.bases((record.attempt,)) if record.attempt in listing.bases else ()
    inventory = book.inventory(listing)
    return RemoteKnown(
        listed=True,
        claims=frozenset(listing.claims),
        base_recorded=any(_same_history(base, record) for base in bases),
        commits=book.commits(listing.commits),
        pins=frozenset(listing.pins),
        intents=frozenset(listing.intents),
        copies=inventory.copies,
        chains=inventory.chains,
        keys={c: tuple(keys) for c, keys in listing.keys.items()},
    )


def _lift(book: RemoteBook, intents: list[CheckpointId], now: float) -> tuple[CheckpointId, ...]:
    """Forget the intents that are a day old and carried out; those that were."""
    read = [intent for c in intents if (intent := book.intent(c)) is not None]
    spent = rules.spent_intents(read, {}, now)
    for checkpoint in spent:
        book.forget_intent(checkpoint)
    return spent
