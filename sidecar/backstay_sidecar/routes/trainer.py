"""Routes of the pod's own trainer. On the unix socket only: who can open it is the pod.

A capture notice is a courtesy: without it the slot is found within a second.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response

from backstay_protocol.messages import CaptureNotice, ConfirmRequest, RestoreRequest
from backstay_protocol.names import URL_CAPTURES, URL_CONFIRM, URL_RESTORE
from backstay_sidecar.agent import Agent
from backstay_sidecar.routes import examples
from backstay_sidecar.routes.wire import body, documented, held, reply


def router(agent: Agent) -> APIRouter:
    """The routes, bound to one agent."""
    routes = APIRouter(tags=["trainer"])

    @routes.post(URL_CAPTURES, **documented(examples.CAPTURE_REPLY))
    async def captures(
        notice: Annotated[CaptureNotice, body(examples.CAPTURE_NOTICE)],
    ) -> Response:
        """A slot was published, or a save was skipped."""
        agent.captured(notice)
        return reply(examples.CAPTURE_REPLY)

    @routes.post(URL_RESTORE, **documented(examples.RESTORE_REPLY))
    async def restore(
        request: Annotated[RestoreRequest, body(examples.RESTORE_REQUEST)],
    ) -> Response:
        """A rank joins its world's restore. Long poll; repeat it while the status is `wait`."""
        return reply(await held(agent.stopping, agent.restore(request)))

    @routes.post(URL_CONFIRM, **documented(examples.CONFIRM_REPLY))
    async def confirm(
        request: Annotated[ConfirmRequest, body(examples.CONFIRM_REQUEST)],
    ) -> Response:
        """How a rank's load went. Long poll; repeat it while the status is `wait`."""
        return reply(await held(agent.stopping, agent.confirm(request)))

    return routes
