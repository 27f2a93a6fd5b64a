"""The leader: the sidecar of replica 0 begins attempts and speaks for the job.

Routes call it. It holds nothing that it can't get back from the other sidecars and the remote tier:
after kill -9 the members join and report again. Rounds are driven by `round_driver`, what the
sidecars are told is decided by `duties`, the remote tier is looked after by `remote_duties`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable

from backstay_protocol import codec
from backstay_protocol.clock import Clock
from backstay_protocol.errors import BackstayError, ProtocolError
from backstay_protocol.files import read_small, write_atomically
from backstay_protocol.ids import CheckpointId
from backstay_protocol.layout import RemoteLayout
from backstay_protocol.messages import (
    FAILED,
    CheckpointList,
    FlushReply,
    JobView,
    JoinReply,
    JoinRequest,
    Placement,
    Policies,
    Policy,
    ProgressReply,
    ProgressRequest,
    RestorePreview,
    RestoreView,
    VerdictReply,
    VerdictRequest,
)
from backstay_protocol.names import REMOTE
from backstay_protocol.topology import ManualChoice, PodIdentity, Topology
from backstay_sidecar.restore import views
from backstay_sidecar.restore.duties import Duties
from backstay_sidecar.restore.orders import NOTICE_SECONDS, Look
from backstay_sidecar.restore.ports import Emit, MemberDoor, Peers, RemoteStore
from backstay_sidecar.restore.preview import preview
from backstay_sidecar.restore.remote_book import RemoteBook
from backstay_sidecar.restore.remote_duties import RemoteDuties
from backstay_sidecar.restore.round_driver import Begun, RoundDriver
from backstay_sidecar.restore.signals import Changes, Tasks

SPEAK_SECONDS = 1.0
"""The word is worked out anew at least so often: orders depend on time."""
SETTLE_SECONDS = 0.02
"""Changes that come together are one change."""
MAX_WAIT_SECONDS = 30.0
DISOWN_SECONDS = 2.0
KEPT_RESTORES = 20
EXPLAIN_SECONDS = 60.0
NOTHING_TOLD = Policies()
SAME_FLUSH_SECONDS = 5.0


class Leader:
    """One, beside the member of replica 0. Call `start` in a running loop, `close` at the end."""

    def __init__(
        self,
        *,
        topology: Topology,
        pod: PodIdentity,
        own: MemberDoor,
        peers: Peers,
        remote: RemoteStore | None,
        clock: Clock,
        emit: Emit,
        sweep: Callable[[], int] | None = None,
        keep: Callable[[tuple[RestoreView, ...]], None] | None = None,
        placement_file: str = "",
    ) -> None:
        """`own`: the member of this very sidecar, prepared; `sweep` throws away old unfinished
        uploads, and blocks; so does `keep`, which stores the restores where there is no remote
        tier; `placement_file`: in memory, it outlives this process.
        """
        self._keep = keep
        self._topology = topology
        self._own = own
        self._clock = clock
        self._emit = emit
        self._duties = Duties(topology, int(clock.time() * 1000))
        self._placement_file = placement_file
        self._restores: deque[RestoreView] = deque(maxlen=KEPT_RESTORES)
        self._newest: dict[str, tuple[CheckpointId, float]] = {}
        """Tier -> (newest complete checkpoint, when it was heard of)."""
        self._changes = Changes()
        self._dirty = False
        self._looked: tuple[float, float] | None = None
        """When it last looked at what the sidecars say: monotonic, and since the epoch."""
        self._flushed = (FlushReply(step=0, durable=False), 0.0)
        """The last one that was done, and until when it is told again."""
        self._tasks = Tasks(emit)
        self._book = _book(topology, remote, clock)
        self._driver = RoundDriver(
            topology=topology,
            pod=pod,
            own=own,
            peers=peers,
            book=self._book,
            clock=clock,
            emit=emit,
            begun=self._begun,
            interval=self._duties.first_interval,
        )
        self._remote: RemoteDuties | None = None
        if self._book is not None:
            self._remote = RemoteDuties(
                topology=topology,
                book=self._book,
                duties=self._duties,
                clock=clock,
                emit=emit,
                learned=self._touch,
                resting=lambda: bool(self._driver.waiting),
                round_of=own.round_of,
                sweep=sweep,
            )

    # --- life ---------------------------------------------------------------------------------

    def start(self, policies: Policies = NOTHING_TOLD) -> None:
        """Take over an attempt that runs, then drive rounds and duties.

        `policies`: what this very sidecar remembers.
        """
        self._recall_placement()
        self._duties.standing.hear(policies)
        record = self._own.record
        if record is not None and record.attempt == self._own.attempt:
            self._duties.begin(record, self._clock.monotonic())
            self._emit("leader_took_over", attempt=record.attempt)
        self._speak()
        self._tasks.spawn(self._driver.run())
        self._tasks.spawn(self._keep_speaking())
        if self._remote is not None:
            self._tasks.spawn(self._remote.run())

    async def close(self) -> None:
        """End every task; in the remote tier say that this owner is gone, if that is quick."""
        await self._tasks.close()
        await self._driver.close()
        if self._book is None:
            return
        if self._duties.attempt and not self._duties.remote.trouble:
            with contextlib.suppress(BackstayError, OSError, TimeoutError):
                async with asyncio.timeout(DISOWN_SECONDS):
                    await self._book.call(lambda book: book.disown())
        self._book.close()

    # --- rounds -------------------------------------------------------------------------------

    async def join(self, request: JoinRequest) -> JoinReply:
        """POST /v1/leader/join: a long poll. A pod that was replaced opens no round."""
        newest = self._duties.census.generation(request.replica)
        if request.generation < newest:
            message = (
                f"this pod (generation {request.generation} of replica {request.replica}) was "
                f"replaced by generation {newest}"
            )
            return JoinReply(status=FAILED, message=message)
        self._duties.moved(request.replica, request.address)
        return await self._driver.join(request)

    async def verdict(self, request: VerdictRequest) -> VerdictReply:
        """POST /v1/leader/verdict: a long poll."""
        return await self._driver.verdict(request)

    def _begun(self, begun: Begun) -> None:
        record, summary, joined_ago = begun
        wall, now = self._clock.time(), self._clock.monotonic()
        led = bool(self._duties.attempt)
        stopped = wall - self._duties.quiet_seconds(now) if led else 0.0
        self._duties.begin(record, now)
        told = summary.explanation
        view = RestoreView(
            attempt=record.attempt,
            base=record.base,
            finished=wall,
            seconds=summary.seconds,
            bytes_by_tier=summary.bytes_by_tier,
            lost_steps=summary.lost_steps,
            bad=summary.bad,
            reason=summary.reason,
            stopped=stopped,
            joined=wall - joined_ago,
            outcome=told.outcome,
            origin=told.origin,
            candidates=told.candidates,
            more_candidates=told.more,
            step=told.checkpoint.step if told.checkpoint is not None else 0,
        )
        self._restores.append(view)
        self._tasks.spawn(self._keep_explanation(view))
        self._emit(
            "attempt_begun",
            attempt=record.attempt,
            base=str(record.base) if record.base else "",
            bytes_by_tier=view.bytes_by_tier,
            lost_steps=view.lost_steps,
            seconds=view.seconds,
            bad=view.bad,
            origin=view.origin,
            message=view.reason,
        )
        self._touch()
        if self._remote is not None:
            self._remote.poke()

    async def _keep_explanation(self, view: RestoreView) -> None:
        """For after the fact. Best effort: nothing waits for it, and nothing depends on it."""
        book = self._book
        try:
            async with asyncio.timeout(EXPLAIN_SECONDS):
                if book is not None:
                    await book.call(lambda book: book.explain(view))
                elif self._keep is not None:
                    await asyncio.to_thread(self._keep, tuple(self._restores))
        except (BackstayError, OSError, TimeoutError) as error:
            self._emit("explanation_not_kept", attempt=view.attempt, message=str(error))

    async def preview(self, manual: ManualChoice | None = None) -> RestorePreview:
        """GET /v1/restore/preview: what a restore would take now. `manual`: as if it was chosen."""
        return await preview(self._topology, self._duties, self._own.record, self._book, manual)

    # --- the word -----------------------------------------------------------------------------

    async def progress(self, request: ProgressRequest) -> ProgressReply:
        """POST /v1/leader/progress: hear, and answer with the word, at once if it is new there."""
        if not self._duties.take(request, self._clock.monotonic()):
            return ProgressReply(
                attempt=0,
                version=self._duties.word.version,
                message=f"this pod of replica {request.replica} was replaced by a newer one",
            )
        if request.uploaded and self._remote is not None:
            self._remote.poke()
        self._touch()
        await self._changes.until(
            lambda: self._duties.word.version != request.seen_version,
            min(max(request.wait_seconds, 0.0), MAX_WAIT_SECONDS),
        )
        return self._duties.word

    def _touch(self) -> None:
        """What the word depends on has changed."""
        self._dirty = True
        self._changes.notify()

    async def _keep_speaking(self) -> None:
        while True:
            await self._changes.until(lambda: self._dirty, SPEAK_SECONDS)
            await asyncio.sleep(SETTLE_SECONDS)
            began = self._clock.monotonic()
            self._speak()
            # With a large world a word takes a while: leave the loop to others for longer.
            await asyncio.sleep(min(1.0, 4 * (self._clock.monotonic() - began)))

    def _speak(self) -> None:
        self._dirty = False
        before = self._duties.word
        look = self._look(self._driver.waiting)
        word = self._duties.speak(look)
        if word is not before:
            self._note_newest(word)
            self._changes.notify()

    def _look(self, waiting: Iterable[int] = ()) -> Look:
        """What the duties decide from; long after the last look, this process was paused."""
        now, wall = self._clock.monotonic(), self._clock.time()
        if self._looked is not None:
            gap = max(now - self._looked[0], wall - self._looked[1])  # suspended, only wall goes on
            if gap > NOTICE_SECONDS:
                self._duties.woke(now)
        self._looked = (now, wall)
        return self._duties.look(now, waiting)

    def _note_newest(self, word: ProgressReply) -> None:
        for tier, there in word.complete.items():
            known = self._newest.get(tier)
            if there and (known is None or known[0] != there[0]):
                self._newest[tier] = (there[0], self._clock.time())

    # --- people, operator, runner -------------------------------------------------------------

    def job(self) -> JobView:
        """GET /v1/job."""
        return views.job_view(
            topology=self._topology,
            duties=self._duties,
            current=self._driver.round,
            waiting=bool(self._driver.waiting),
            restores=tuple(self._restores),
            learned={tier: when for tier, (_, when) in self._newest.items()},
            now=self._clock.monotonic(),
            away=self._driver.away,
        )

    def checkpoints(self) -> CheckpointList:
        """GET /v1/checkpoints: all that is known of any tier, newest first."""
        return views.checkpoint_list(self._topology, self._duties)

    def find(self, name: str) -> CheckpointId:
        """`<step>-<attempt>`, a bare step or `latest` (both: on the lineage). Raises ValueError."""
        return views.find_checkpoint(name, self.checkpoints())

    def set_policy(self, policy: Policy) -> Policy:
        """PUT /v1/policy; what will be in force, from which step on. Raises ValueError."""
        look = self._look()
        set_ = self._duties.set_policy(policy, look)
        self._touch()
        return set_

    def set_placement(self, placement: Placement) -> Placement:
        """PUT /v1/placement; said again, it changes nothing."""
        if placement != self._duties.placement:
            self._duties.placement = placement
            if self._placement_file:
                with contextlib.suppress(OSError):
                    write_atomically(self._placement_file, codec.dumps(placement))
            self._touch()
        return placement

    def _recall_placement(self) -> None:
        """Else the ring would be another one until the operator has said it again."""
        if self._placement_file:
            with contextlib.suppress(OSError, ProtocolError):
                found = codec.loads(Placement, read_small(self._placement_file))
                self._duties.placement = found

    def flush(self) -> FlushReply:
        """POST /v1/flush: one common save; asked again, it tells how far that got.

        All pods that end together ask for the same save: who asks last must hear that it is done,
        for the others' trainers have ended by then and another save would never come about.
        """
        flushed, until = self._flushed
        if self._clock.monotonic() < until:
            return flushed
        reply = self._duties.flush()
        if reply.durable:
            self._flushed = (reply, self._clock.monotonic() + SAME_FLUSH_SECONDS)
        self._touch()
        return reply

    def request(self, words: str) -> None:
        """`save`, `flush`, or `pin`, `unpin`, `persist`, `delete` and a name. Raises ValueError."""
        verb, _, name = words.partition(" ")
        if verb == "delete" and CheckpointId.parse(name) in self._duties.protected():
            raise ValueError(
                f"{name} can't be deleted: it is pinned, the last durable checkpoint, the base of "
                "the attempt that runs, or the only one that is complete"
            )
        self._duties.ask(words)
        if verb in ("pin", "unpin") and self._remote is not None:
            self._remote.pin(CheckpointId.parse(name), verb == "pin")
        if verb == "delete" and self._remote is not None:
            self._remote.poke()
        self._touch()


def _book(topology: Topology, remote: RemoteStore | None, clock: Clock) -> RemoteBook | None:
    tier = getattr(topology.tiers, REMOTE)
    if tier is None or remote is None:
        return None
    layout = RemoteLayout(tier.prefix, topology.run)
    return RemoteBook(remote, layout, topology.run, topology.owner, clock)
