"""Routes of the leader, for the other sidecars and for the operator. 409 where this is not it.

On the API port, with the job's token; GET /v1/job and POST /v1/flush also on the unix socket.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from backstay_protocol.messages import (
    JoinRequest,
    Placement,
    Policy,
    ProgressRequest,
    VerdictRequest,
)
from backstay_protocol.names import (
    URL_FLUSH,
    URL_JOB,
    URL_JOIN,
    URL_PLACEMENT,
    URL_POLICY,
    URL_PROGRESS,
    URL_RESTORE_PREVIEW,
    URL_VERDICT,
)
from backstay_protocol.topology import ManualChoice
from backstay_sidecar import errors
from backstay_sidecar.agent import Agent
from backstay_sidecar.errors import ApiError
from backstay_sidecar.restore.leader import Leader
from backstay_sidecar.routes import examples
from backstay_sidecar.routes.wire import body, documented, held, reply

PREVIEW_TOKEN = "preview"  # no job's token is like it: those end in the number of their change


def router(agent: Agent) -> APIRouter:
    """What only the leader answers."""
    routes = APIRouter(tags=["leader"])

    @routes.post(URL_JOIN, **documented(examples.JOIN_REPLY))
    async def join(request: Annotated[JoinRequest, body(examples.JOIN_REQUEST)]) -> Response:
        """Ranks of one replica have joined. Long poll for the decision."""
        return reply(await held(agent.stopping, _leader(agent).join(request)))

    @routes.post(URL_VERDICT, **documented(examples.VERDICT_REPLY))
    async def verdict(
        request: Annotated[VerdictRequest, body(examples.VERDICT_REQUEST)],
    ) -> Response:
        """How the load of one replica's ranks went. Long poll for what follows."""
        return reply(await held(agent.stopping, _leader(agent).verdict(request)))

    @routes.post(URL_PROGRESS, **documented(examples.PROGRESS_REPLY))
    async def progress(
        request: Annotated[ProgressRequest, body(examples.PROGRESS_REQUEST)],
    ) -> Response:
        """Steps and inventory of one replica. Long poll for the leader's word."""
        return reply(await held(agent.stopping, _leader(agent).progress(request)))

    @routes.put(URL_POLICY, **documented(examples.POLICY))
    async def policy(policy: Annotated[Policy, body(examples.POLICY)]) -> Response:
        """Other schedules and retention; the reply says from which step on they hold."""
        try:
            return reply(_leader(agent).set_policy(policy))
        except ValueError as error:
            raise ApiError(409, errors.CONFLICT, str(error)) from error

    @routes.put(URL_PLACEMENT, **documented(examples.PLACEMENT))
    async def placement(placement: Annotated[Placement, body(examples.PLACEMENT)]) -> Response:
        """Where the pods run, and in which failure domains; neighbours are chosen by it."""
        return reply(_leader(agent).set_placement(placement))

    return routes


def operator_router(agent: Agent) -> APIRouter:
    """What operator and people ask; a sidecar that does not lead passes it on."""
    routes = APIRouter(tags=["operator"])

    @routes.get(URL_JOB, **documented(examples.JOB))
    async def job() -> Response:
        """The whole job in one view."""
        return reply(await agent.whole_job.view())

    @routes.get(URL_RESTORE_PREVIEW, **documented(examples.RESTORE_PREVIEW))
    async def preview(
        request: Request,
        step: Annotated[int, Query(ge=-1, description="As if `restore.step` was this")] = -1,
        attempt: Annotated[int, Query(ge=0, description="`restore.attempt`")] = 0,
        run: Annotated[
            str, Query(description="`<namespace>/<runName>`, as if `restore.from` was this")
        ] = "",
        fresh: Annotated[bool, Query(description="As if `restore.fresh` was true")] = False,
    ) -> Response:
        """What a restore would take now, and of every checkpoint in sight why it is taken or not.

        Nothing begins. Without a query: by the `restore` that the job was started with.
        """
        asked = ManualChoice.asked(PREVIEW_TOKEN, step=step, attempt=attempt, run=run, fresh=fresh)
        return reply(await agent.whole_job.preview(asked, request.url.query))

    @routes.post(URL_FLUSH, **documented(examples.FLUSH_REPLY))
    async def flush() -> Response:
        """Ask for one common save; repeat it until the reply is `durable`."""
        return reply(await agent.whole_job.flush())

    return routes


def _leader(agent: Agent) -> Leader:
    if agent.leader is None:
        raise ApiError(
            409,
            errors.NOT_LEADER,
            f"replica {agent.replica} does not lead",
            f"ask replica 0 at {agent.topology.address_of(0)}",
        )
    return agent.leader
