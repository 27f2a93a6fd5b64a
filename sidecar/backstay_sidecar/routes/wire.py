"""What all routes share: replies by the protocol's codec, and how routes are documented."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Body, Response

from backstay_protocol import codec
from backstay_protocol.messages import ErrorReply
from backstay_sidecar import errors
from backstay_sidecar.errors import ApiError

T = TypeVar("T")

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "Refused; `code`, `message`, `hint` say why"},
    "5XX": {"model": ErrorReply, "description": "Failed here; `code`, `message`, `hint` say why"},
}


def reply(message: Any, status: int = 200) -> Response:
    """A message as JSON. Both ends use the codec: what it reads is what it wrote."""
    return Response(codec.dumps(message), status, media_type="application/json")


async def held(stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """A long poll: it ends with 503 when this sidecar stops, and with its caller's connection."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(503, errors.STOPPING, "this sidecar is stopping", "try again")
    finally:
        stop.cancel()
        task.cancel()


def documented(example: Any, **more: Any) -> dict[str, Any]:
    """Keyword arguments of a route decorator: the reply's type and one example."""
    content = {"application/json": {"example": codec.to_plain(example)}}
    return {
        "response_model": type(example),
        "responses": {**ERRORS, more.get("status_code", 200): {"content": content}},
        **more,
    }


def body(example: Any) -> Any:
    """The request body of a route, with one example."""
    return Body(examples=[codec.to_plain(example)])
