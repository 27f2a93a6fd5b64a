"""Routes of the other sidecars: offers of copies, and the leader's promise and store.

On the API port, with the job's token.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response

from backstay_protocol.messages import PromiseRequest, ReplicaOffer, StoreRequest
from backstay_protocol.names import URL_PROMISE, URL_REPLICAS, URL_STORE
from backstay_sidecar.agent import Agent
from backstay_sidecar.routes import examples
from backstay_sidecar.routes.wire import body, documented, reply


def router(agent: Agent) -> APIRouter:
    """The routes, bound to one agent."""
    routes = APIRouter(tags=["peers"])

    @routes.post(URL_REPLICAS, **documented(examples.REPLICA_REPLY))
    async def replicas(offer: Annotated[ReplicaOffer, body(examples.REPLICA_OFFER)]) -> Response:
        """Please keep a copy of this shard. Repeat it until the answer is `complete`."""
        return reply(await agent.keep(offer))

    @routes.post(URL_PROMISE, **documented(examples.PROMISE_REPLY))
    async def promise(
        request: Annotated[PromiseRequest, body(examples.PROMISE_REQUEST)],
    ) -> Response:
        """Promise an attempt number; then report record and inventory."""
        return reply(await agent.member.promise(request))

    @routes.post(URL_STORE, **documented(examples.STORE_REPLY))
    async def store(request: Annotated[StoreRequest, body(examples.STORE_REQUEST)]) -> Response:
        """Keep the record of an attempt; `ran` is the go-ahead."""
        return reply(await agent.member.store(request))

    return routes
