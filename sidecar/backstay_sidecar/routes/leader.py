"""Routes of the leader, for the other sidecars and for the operator. 409 where this is not it.

On the API port, with the job's token; GET /v1/job and POST /v1/flush also on the unix socket.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response

from backstay_protocol.messages import JoinRequest, Policy, ProgressRequest, VerdictRequest
from backstay_protocol.names import (
    URL_FLUSH,
    URL_JOB,
    URL_JOIN,
    URL_POLICY,
    URL_PROGRESS,
    URL_VERDICT,
)
from backstay_sidecar import errors
from backstay_sidecar.agent import Agent
from backstay_sidecar.errors import ApiError
from backstay_sidecar.restore.leader import Leader
from backstay_sidecar.routes import examples
from backstay_sidecar.routes.wire import body, documented, held, reply


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
        """Another interval for all ranks; the reply says from which step on it holds."""
        try:
            return reply(_leader(agent).set_policy(policy))
        except ValueError as error:
            raise ApiError(409, errors.CONFLICT, str(error)) from error

    return routes


def operator_router(agent: Agent) -> APIRouter:
    """What operator and people ask; a sidecar that does not lead passes it on."""
    routes = APIRouter(tags=["operator"])

    @routes.get(URL_JOB, **documented(examples.JOB))
    async def job() -> Response:
        """The whole job in one view."""
        return reply(await agent.whole_job.view())

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
