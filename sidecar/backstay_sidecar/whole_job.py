"""What is asked of the whole job: the leader answers, in this process or in replica 0's sidecar.

The agent makes it; routes, pre-stop and ending ask it. It decides nothing and keeps nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from backstay_protocol import codec
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    CheckpointList,
    CheckpointStatus,
    FlushReply,
    JobView,
    RestorePreview,
)
from backstay_protocol.names import (
    URL_CHECKPOINT,
    URL_CHECKPOINTS,
    URL_FLUSH,
    URL_JOB,
    URL_PERSIST,
    URL_PIN,
    URL_RESTORE_PREVIEW,
)
from backstay_protocol.pull import Endpoint, get_bytes
from backstay_protocol.topology import ManualChoice
from backstay_sidecar import errors
from backstay_sidecar.errors import ApiError
from backstay_sidecar.restore.leader import Leader
from backstay_sidecar.restore.peers import LEADER, HttpPeers

PROXY_SECONDS = 10.0
PREVIEW_SECONDS = 75.0
"""The leader lists the remote tier before it answers."""
WISHES = {
    "pin": ("POST", URL_PIN),
    "unpin": ("DELETE", URL_PIN),
    "persist": ("POST", URL_PERSIST),
    "delete": ("DELETE", URL_CHECKPOINT),
}
"""What people ask of a checkpoint, and the route that carries it to the leader."""

T = TypeVar("T")


class WholeJob:
    """One per sidecar. Each method may raise ApiError, Refused and Unreachable."""

    def __init__(
        self, leader: Leader | None, peers: HttpPeers, requested: Callable[[str], None]
    ) -> None:
        """`leader`: if it is here; `requested`: told of each wish, in words."""
        self._leader = leader
        self._peers = peers
        self._requested = requested

    async def find(self, name: str) -> CheckpointId:
        """`<step>-<attempt>`, or a bare step or `latest`: the one on the lineage. ApiError 404."""
        try:
            if "-" in name:
                return CheckpointId.parse(name)
            if self._leader is not None:
                return self._leader.find(name)
            return (await self._ask(f"{URL_CHECKPOINTS}/{name}", CheckpointStatus)).checkpoint
        except ValueError as error:
            raise ApiError(
                404,
                errors.NOT_FOUND,
                str(error),
                "name it <step>-<attempt>, or a step or `latest` for the one on the lineage; "
                f"GET {URL_CHECKPOINTS} lists them",
            ) from error

    async def checkpoints(self) -> CheckpointList:
        """GET /v1/checkpoints."""
        if self._leader is not None:
            return self._leader.checkpoints()
        return await self._ask(URL_CHECKPOINTS, CheckpointList)

    async def view(self) -> JobView:
        """GET /v1/job."""
        if self._leader is not None:
            return self._leader.job()
        return await self._ask(URL_JOB, JobView)

    async def preview(self, manual: ManualChoice | None, query: str) -> RestorePreview:
        """GET /v1/restore/preview; `query`: the same choice as it was asked for."""
        if self._leader is not None:
            return await self._leader.preview(manual)
        return await self._ask(f"{URL_RESTORE_PREVIEW}?{query}", RestorePreview, PREVIEW_SECONDS)

    async def wish(self, verb: str, checkpoint: CheckpointId) -> None:
        """Pin, unpin, persist or delete."""
        self._requested(f"{verb} {checkpoint}")
        if self._leader is None:
            method, path = WISHES[verb]
            url = path.format(checkpoint=checkpoint)
            await self._peers.call(LEADER, url, {}, CheckpointStatus, 0.0, method=method)
            return
        try:
            self._leader.request(f"{verb} {checkpoint}")
        except ValueError as error:
            raise ApiError(409, errors.CONFLICT, str(error)) from error

    async def flush(self) -> FlushReply:
        """POST /v1/flush."""
        if self._leader is not None:
            return self._leader.flush()
        return await self._peers.call(LEADER, URL_FLUSH, {}, FlushReply, 0.0)

    async def _ask(self, path: str, reply: type[T], seconds: float = PROXY_SECONDS) -> T:
        endpoint = Endpoint(f"{self._peers.url(LEADER)}{path}", self._peers.headers)
        try:
            data = await asyncio.to_thread(get_bytes, endpoint, timeout=seconds)
        except FileNotFoundError as error:
            raise ApiError(404, errors.NOT_FOUND, str(error)) from error
        return codec.loads(reply, data)
