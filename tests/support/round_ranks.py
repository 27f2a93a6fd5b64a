"""Ranks that restore against real sidecars, each in a thread, through whatever dies meanwhile.

They do what the trainer library does at the wire: POST /v1/restore until there is a decision, look
at the first source of every shard, confirm, and begin anew when told so.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError
from backstay_protocol.messages import (
    AGAIN,
    FAILED,
    GO,
    LOAD,
    WAIT,
    BadSource,
    ConfirmReply,
    ConfirmRequest,
    Decision,
    RestoreReply,
    RestoreRequest,
    ShardSources,
    Source,
)
from backstay_protocol.names import URL_CONFIRM, URL_RESTORE
from support.sidecar import SidecarJob

PATIENCE_SECONDS = 45.0
T = TypeVar("T")


@dataclass
class RankThread:
    """One process of one rank."""

    job: SidecarJob
    rank: int
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    decision: Decision | None = None
    """That it got the go-ahead for."""
    answer: ConfirmReply | None = None
    failure: str = ""
    last_step: int = -1
    last_attempt: int = 0
    stopped: bool = False

    def start(self) -> RankThread:
        self._thread = threading.Thread(target=self._run, name=f"rank-{self.rank}", daemon=True)
        self._thread.start()
        return self

    def join(self) -> RankThread:
        self._thread.join(PATIENCE_SECONDS + 5)
        assert not self._thread.is_alive(), f"rank {self.rank} hangs"
        return self

    def kill(self) -> None:
        """The process dies: it asks nothing more."""
        self.stopped = True

    @property
    def ended_on(self) -> tuple[int, int]:
        """(attempt, base step)."""
        assert self.decision is not None, self.failure
        return self.decision.attempt, self.decision.base.step if self.decision.base else 0

    def _run(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.stopped:
            if time.monotonic() > deadline:
                self.failure = f"rank {self.rank} did not get its go-ahead in time"
                return
            try:
                if self._once():
                    return
            except (OSError, http.client.HTTPException, ProtocolError, _NotNow):
                time.sleep(0.05)  # the sidecar is down just now

    def _once(self) -> bool:
        reply = self._post(URL_RESTORE, self._request(), RestoreReply)
        if reply.status == FAILED:
            self.failure = reply.message
            return True
        if reply.status != LOAD:
            return False
        assert reply.decision is not None
        bad = [b for shard in reply.decision.shards if (b := _try(shard)) is not None]
        answer = self._confirm(reply.decision, bad)
        if answer.status == AGAIN:
            return False
        if answer.status == GO:
            self.decision, self.answer = reply.decision, answer
            self.job.train(self.rank, *self.ended_on)
        else:
            self.failure = answer.message
        return True

    def _confirm(self, decision: Decision, bad: list[BadSource]) -> ConfirmReply:
        request = ConfirmRequest(
            rank=self.rank,
            nonce=self.nonce,
            round=decision.round,
            serial=decision.serial,
            ok=not bad,
            bad=tuple(bad),
            bytes_by_tier={shard.sources[0].tier: shard.size for shard in decision.shards},
            wait_seconds=2.0,
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.stopped and time.monotonic() < deadline:
            try:
                answer = self._post(URL_CONFIRM, request, ConfirmReply)
            except (OSError, http.client.HTTPException, ProtocolError, _NotNow):
                time.sleep(0.05)
                continue
            if answer.status != WAIT:
                return answer
        raise _NotNow

    def _request(self) -> RestoreRequest:
        return RestoreRequest(
            rank=self.rank,
            local_rank=self.rank % self.job.per_replica,
            world_size=self.job.topology.world_size,
            nonce=self.nonce,
            pid=os.getpid(),
            last_step=self.last_step,
            last_attempt=self.last_attempt,
            wait_seconds=2.0,
        )

    def _post(self, path: str, message: object, reply: type[T]) -> T:
        replica = self.job.replica_of(self.rank)
        answer = self.job.request(replica, "POST", path, message, port="unix", timeout=10)
        if answer.status != 200:
            raise _NotNow(answer.body)
        return codec.loads(reply, answer.body)


class _NotNow(Exception):
    pass


def restore_all(job: SidecarJob, ranks: Iterable[int] | None = None) -> list[RankThread]:
    """New processes of all ranks; they run already."""
    wanted = range(job.topology.world_size) if ranks is None else ranks
    return [RankThread(job, rank).start() for rank in wanted]


def _try(shard: ShardSources) -> BadSource | None:
    """Look at the manifest of the nearest source, as a reader does first."""
    source = shard.sources[0]
    try:
        manifest = _manifest(source)
    except FileNotFoundError as error:
        return _bad(shard, source, proven=True, detail=str(error))
    except OSError as error:
        return _bad(shard, source, proven=False, detail=str(error))
    if manifest["fingerprint"] != shard.fingerprint:
        return _bad(shard, source, proven=True, detail="another fingerprint")
    return None


def _manifest(source: Source) -> dict[str, object]:
    if source.manifest_path:
        with open(source.manifest_path, "rb") as file:
            return dict(json.load(file))
    request = urllib.request.Request(source.manifest_url, headers=source.headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            raise FileNotFoundError(source.manifest_url) from error
        raise OSError(str(error)) from error


def _bad(shard: ShardSources, source: Source, *, proven: bool, detail: str) -> BadSource:
    return BadSource(
        shard_rank=shard.rank, tier=source.tier, holder=source.holder, proven=proven, detail=detail
    )
