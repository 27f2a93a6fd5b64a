"""Bytes and manifests of shards that lie in this pod's volumes, by zero-copy send, with Range.

For peers that pull, for ranks that restore and for people. While a slot is being sent its shared
lock is held. Nothing is verified here: the receiver digests each chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send

from backstay_protocol.errors import CorruptData
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import ErrorReply
from backstay_protocol.names import URL_SHARD, URL_SHARD_MANIFEST
from backstay_sidecar import errors
from backstay_sidecar.agent import Agent
from backstay_sidecar.errors import ApiError
from backstay_sidecar.routes import examples
from backstay_sidecar.routes.people import Checkpoint
from backstay_sidecar.routes.ranges import ByteRange, Unsatisfiable, parse_range
from backstay_sidecar.routes.wire import ERRORS, documented, reply
from backstay_sidecar.tiers.base import ShardReader, Tier
from backstay_sidecar.zerocopy import EXTENSION

BYTES = "application/octet-stream"
COPY_BYTES = 1 << 20  # where the server can't send without copying
_BINARY = {"content": {BYTES: {"schema": {"type": "string", "format": "binary"}}}}

TierName = Annotated[
    str,
    Query(
        alias="tier", description="memory, local or neighbor (held for others); nearest if absent"
    ),
]

Verify = Annotated[
    bool, Query(description="Read the bytes first; a copy that is bad is struck, not told of")
]


def router(agent: Agent) -> APIRouter:
    """The routes, bound to one agent."""
    routes = APIRouter(tags=["shards"])

    bytes_of: dict[str, Any] = {
        "response_class": Response,
        "responses": {
            **ERRORS,
            200: {"description": "The whole shard, plain safetensors", **_BINARY},
            206: {"description": "The range", **_BINARY},
            416: {"description": "No such range", "model": ErrorReply},
        },
    }

    @routes.head(URL_SHARD, **bytes_of)
    @routes.get(URL_SHARD, operation_id="shard", **bytes_of)
    async def shard(
        request: Request, checkpoint: Checkpoint, rank: int, tier: TierName = ""
    ) -> Response:
        """A shard's bytes. One `Range` per request; the ETag is the shard's fingerprint."""
        opened = await _open(agent, await agent.whole_job.find(checkpoint), rank, tier)
        try:
            return _ShardResponse(opened, _asked_for(request, opened.reader), agent)
        except Unsatisfiable as error:
            await opened.close()
            return _not_satisfiable(str(error), opened.reader.manifest.size)

    @routes.get(URL_SHARD_MANIFEST, **documented(examples.MANIFEST))
    async def manifest(
        checkpoint: Checkpoint, rank: int, tier: TierName = "", verify: Verify = False
    ) -> Response:
        """A shard's sealed manifest: size, lineage, one digest per chunk."""
        if verify:
            found = await agent.whole_job.find(checkpoint)
            for shelf in agent.stores.shelves(tier):
                await asyncio.to_thread(agent.replicator.verify, shelf, found, rank)
        opened = await _open(agent, await agent.whole_job.find(checkpoint), rank, tier)
        await opened.close()
        return reply(opened.reader.manifest)

    return routes


class _Opened:
    """A shard that is held open until `close`."""

    def __init__(self, tier: Tier, reader: ShardReader, stack: contextlib.ExitStack) -> None:
        self.tier = tier
        self.reader = reader
        self._stack = stack

    async def close(self) -> None:
        await asyncio.to_thread(self._stack.close)


async def _open(agent: Agent, checkpoint: CheckpointId, rank: int, tier: str) -> _Opened:
    shelves = agent.stores.shelves(tier)
    opened = await asyncio.to_thread(_open_nearest, shelves, checkpoint, rank)
    if opened is None:
        where = " or ".join(shelf.name for shelf in shelves) or tier
        raise ApiError(
            404,
            errors.NOT_FOUND,
            f"rank {rank} of {checkpoint} is not in {where} of replica {agent.replica}",
            "GET /v1/checkpoints says what there is; other sidecars hold other shards",
        )
    return opened


def _open_nearest(shelves: list[Tier], checkpoint: CheckpointId, rank: int) -> _Opened | None:
    for shelf in shelves:
        with contextlib.ExitStack() as stack:
            try:
                reader = stack.enter_context(shelf.open(checkpoint, rank))
            except (OSError, CorruptData):
                continue
            return _Opened(shelf, reader, stack.pop_all())
    return None


def _asked_for(request: Request, reader: ShardReader) -> ByteRange | None:
    """None: the whole. An If-Range of other bytes than these makes the range void."""
    condition = request.headers.get("if-range")
    if condition is not None and condition.strip() != _etag(reader):
        return None
    return parse_range(request.headers.get("range"), reader.manifest.size)


def _etag(reader: ShardReader) -> str:
    return f'"{reader.manifest.fingerprint}"'


def _not_satisfiable(why: str, size: int) -> Response:
    error = ApiError(416, errors.RANGE_NOT_SATISFIABLE, why, f"the shard has {size} bytes")
    response = reply(error.reply, 416)
    response.headers["Content-Range"] = f"bytes */{size}"
    return response


class _ShardResponse(Response):
    """Sends bytes of an open shard, then closes it, whatever happens on the way."""

    def __init__(self, opened: _Opened, part: ByteRange | None, agent: Agent) -> None:
        size = opened.reader.manifest.size
        self._opened = opened
        self._part = part or ByteRange(0, size)
        self._agent = agent
        headers = {
            "Content-Length": str(self._part.length),
            "Accept-Ranges": "bytes",
            "ETag": _etag(opened.reader),
            "Backstay-Tier": opened.tier.name,
        }
        if part is not None:
            headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
        super().__init__(None, 206 if part is not None else 200, headers, BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif EXTENSION in scope.get("extensions", {}):
                await self._send_file(send)
            else:
                await self._copy(send)
            self._agent.metrics.served(self._opened.tier.name, self._part.length)
        finally:
            await self._opened.close()

    async def _send_file(self, send: Send) -> None:
        descriptor = self._opened.reader.fileno()
        assert descriptor is not None, "every shelf served here is a file"
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            await send(
                {
                    "type": EXTENSION,
                    "file": file,
                    "offset": self._part.start,
                    "count": self._part.length,
                }
            )

    async def _copy(self, send: Send) -> None:
        """For servers without the extension (tests, TLS)."""
        buffer = memoryview(bytearray(min(COPY_BYTES, self._part.length)))
        for offset in range(self._part.start, self._part.stop, COPY_BYTES):
            piece = buffer[: min(COPY_BYTES, self._part.stop - offset)]
            await asyncio.to_thread(self._opened.reader.read_into, offset, piece)
            more = offset + len(piece) < self._part.stop
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": more})
