"""The three ASGI applications of a sidecar, one per listener. `main` serves them.

Each listener has its own routes and its own door (auth.py); errors of all of them, whoever raises
them, leave in the one shape.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from backstay_protocol.errors import BackstayError
from backstay_protocol.names import PROTOCOL_VERSION
from backstay_sidecar import errors
from backstay_sidecar.agent import Agent
from backstay_sidecar.auth import Application, CheckProtocol, LimitBody, NeverRaise, RequireToken
from backstay_sidecar.errors import ApiError, as_api_error
from backstay_sidecar.routes import health, leader, peers, people, shards, trainer
from backstay_sidecar.routes.wire import reply

log = logging.getLogger(__name__)

_EXPECTED = (BackstayError, OSError, ValueError)
_CODES = {404: errors.NOT_FOUND, 405: errors.METHOD_NOT_ALLOWED}
_HINTS = {404: "GET /openapi.json lists the routes", 405: "GET /openapi.json lists the methods"}


@dataclass(frozen=True)
class Applications:
    """What each listener serves."""

    trainer: Application
    """Unix socket in the memory volume: the pod's own trainer, and people in the pod. No token."""
    api: Application
    """API port: peers, people, operator. Bearer token."""
    health: Application
    """Health port: kubelet and Prometheus. No token."""


def applications(agent: Agent) -> Applications:
    """Build all three around one agent."""
    for_people = [people.router(agent), shards.router(agent), leader.operator_router(agent)]
    trainer_app = _application("trainer", [trainer.router(agent), *for_people])
    api = _application("API", [*for_people, peers.router(agent), leader.router(agent)])
    health_app = _application("health", [health.router(agent)], documented=False)
    return Applications(
        trainer=CheckProtocol(LimitBody(NeverRaise(trainer_app))),
        api=CheckProtocol(RequireToken(LimitBody(NeverRaise(api)), agent.settings.tokens)),
        health=LimitBody(NeverRaise(health_app)),
    )


def _application(
    name: str, routers: Sequence[APIRouter], *, documented: bool = True
) -> Application:
    app = FastAPI(
        title=f"Backstay sidecar: {name}",
        version=PROTOCOL_VERSION,
        openapi_url="/openapi.json" if documented else None,
        docs_url=None,
        redoc_url=None,
        exception_handlers={
            HTTPException: _http_error,
            RequestValidationError: _invalid,
            Exception: _any_error,
        },
    )
    for router in routers:
        app.include_router(router)
    for kind in _EXPECTED:
        app.add_exception_handler(kind, _any_error)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = ApiError(status, _CODES.get(status, errors.INVALID_REQUEST), message)
    if request.app.openapi_url:
        answer.hint = _HINTS.get(status, "")
    response = reply(answer.reply, status)
    response.headers.update(error.headers or {})
    return response


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5]]
    answer = ApiError(
        422, errors.INVALID_REQUEST, "; ".join(found), "GET /openapi.json tells the fields"
    )
    return reply(answer.reply, 422)


async def _any_error(request: Request, error: Exception) -> Response:
    answer = as_api_error(error)
    if answer.status == 500 and isinstance(error, _EXPECTED):  # others: NeverRaise logs them
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return reply(answer.reply, answer.status)
