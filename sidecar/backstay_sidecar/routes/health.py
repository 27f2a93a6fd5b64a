"""Routes of kubelet and Prometheus, on the health port: nothing else is there, and no token.

Liveness and readiness say only that the process turns: a sick sidecar must not kill training.
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from backstay_protocol.names import URL_HEALTHZ, URL_METRICS, URL_PRESTOP, URL_READYZ
from backstay_sidecar.agent import Agent
from backstay_sidecar.routes import examples
from backstay_sidecar.routes.wire import documented, held, reply


def router(agent: Agent) -> APIRouter:
    """The routes, bound to one agent."""
    routes = APIRouter(tags=["health"])

    @routes.get(URL_HEALTHZ)
    async def healthz() -> Response:
        """The process turns."""
        return Response("ok\n", media_type="text/plain")

    @routes.get(URL_READYZ)
    async def readyz() -> Response:
        """The process is up; never: something was restored."""
        return Response("ok\n", media_type="text/plain")

    @routes.post(URL_PRESTOP, operation_id="prestop_post", **documented(examples.FLUSH_REPLY))
    @routes.get(URL_PRESTOP, **documented(examples.FLUSH_REPLY))
    async def prestop() -> Response:
        """One common save; answered when it is safe, or 20 s before the grace is over."""
        return reply(await held(agent.stopping, agent.prestop.wait()))

    @routes.get(URL_METRICS)
    async def metrics() -> Response:
        """Prometheus' text format."""
        text = agent.metrics.render(agent.replicator.states(), agent.control.progress())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes
