"""Routes for people and tools: what is here and in the job, and what may be asked for.

On the API port with the job's token, and on the pod's unix socket. Shards are in shards.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Path, Response
from fastapi.responses import StreamingResponse

from backstay_protocol.messages import CheckpointStatus
from backstay_protocol.names import (
    URL_CHECKPOINT,
    URL_CHECKPOINTS,
    URL_EVENTS,
    URL_PERSIST,
    URL_PIN,
    URL_STATUS,
)
from backstay_sidecar import errors
from backstay_sidecar.agent import Agent
from backstay_sidecar.errors import ApiError
from backstay_sidecar.events import Event
from backstay_sidecar.routes import examples
from backstay_sidecar.routes.wire import ERRORS, documented, reply

KEEP_ALIVE_SECONDS = 15.0

Checkpoint = Annotated[
    str,
    Path(
        description="`<step>-<attempt>`; a bare step or `latest`: the one on the lineage",
        examples=["latest", "1200", str(examples.CHECKPOINT)],
    ),
]


def router(agent: Agent) -> APIRouter:
    """The routes, bound to one agent."""
    routes = APIRouter(tags=["people"])

    @routes.get(URL_STATUS, **documented(examples.STATUS))
    async def status() -> Response:
        """How this sidecar and its tiers do."""
        return reply(agent.status())

    @routes.get(URL_CHECKPOINTS, **documented(examples.CHECKPOINT_LIST))
    async def checkpoints() -> Response:
        """Every checkpoint of the run that any tier holds, newest first (by the leader)."""
        return reply(await agent.whole_job.checkpoints())

    @routes.get(URL_CHECKPOINT, **documented(examples.CHECKPOINT_STATUS))
    async def checkpoint(checkpoint: Checkpoint) -> Response:
        """One checkpoint: where it is, and whether it is complete."""
        return reply(await _status_of(agent, checkpoint))

    @routes.post(URL_PIN, **documented(examples.CHECKPOINT_STATUS, status_code=202))
    async def pin(checkpoint: Checkpoint) -> Response:
        """Keep it until it is unpinned, whatever retention says."""
        return await _asked(agent, "pin", checkpoint)

    @routes.delete(URL_PIN, **documented(examples.CHECKPOINT_STATUS, status_code=202))
    async def unpin(checkpoint: Checkpoint) -> Response:
        """No longer keep it."""
        return await _asked(agent, "unpin", checkpoint)

    @routes.post(URL_PERSIST, **documented(examples.CHECKPOINT_STATUS, status_code=202))
    async def persist(checkpoint: Checkpoint) -> Response:
        """Move it to every tier, whatever the schedules say."""
        return await _asked(agent, "persist", checkpoint)

    @routes.delete(URL_CHECKPOINT, **documented(examples.CHECKPOINT_STATUS, status_code=202))
    async def delete(checkpoint: Checkpoint) -> Response:
        """Delete it in every tier.

        Refused for the base, the last durable one, pinned ones, and the only one that is complete.
        """
        return await _asked(agent, "delete", checkpoint)

    @routes.get(URL_EVENTS, response_class=StreamingResponse, responses=ERRORS)
    async def events(
        last_event_id: Annotated[
            str, Header(description="Send what happened since this one first")
        ] = "",
    ) -> Response:
        """What happens here, as server-sent events (`id`, `event`, `data` in JSON)."""
        after = int(last_event_id) if last_event_id.isdigit() else None
        return StreamingResponse(
            _stream(agent, after),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    return routes


async def _status_of(agent: Agent, name: str) -> CheckpointStatus:
    found = await agent.whole_job.find(name)
    listed = await agent.whole_job.checkpoints()
    for status in listed.checkpoints:
        if status.checkpoint == found:
            return status
    raise ApiError(
        404,
        errors.NOT_FOUND,
        f"no tier holds anything of {found}",
        f"GET {URL_CHECKPOINTS} lists what there is",
    )


async def _asked(agent: Agent, verb: str, name: str) -> Response:
    """Pass a person's wish to the leader; 202: it has agreed and carries it out from now on."""
    status = await _status_of(agent, name)
    await agent.whole_job.wish(verb, status.checkpoint)
    return reply(status, 202)


async def _stream(agent: Agent, after: int | None) -> AsyncIterator[bytes]:
    yield b": listening\n\n"
    listener = agent.events.listen(after)
    stopping = asyncio.create_task(agent.stopping.wait())
    following: asyncio.Future[Event] | None = None
    try:
        while not stopping.done():
            following = following or asyncio.ensure_future(anext(listener))
            await asyncio.wait(
                (following, stopping),
                timeout=KEEP_ALIVE_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if following.done():
                yield _server_sent(following.result())
                following = None
            else:
                yield b": still here\n\n"
    finally:
        stopping.cancel()
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await following
        await listener.aclose()


def _server_sent(event: Event) -> bytes:
    data = json.dumps(event.plain, default=str)
    return f"id: {event.number}\nevent: {event.kind}\ndata: {data}\n\n".encode()
