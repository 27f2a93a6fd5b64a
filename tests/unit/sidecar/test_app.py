"""The three applications: who is let in, what is refused, and that every error has one shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from backstay_protocol import codec
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import (
    AgentStatus,
    CaptureNotice,
    CheckpointList,
    ErrorBody,
    ErrorReply,
)
from backstay_protocol.names import (
    HEADER_PROTOCOL,
    PROTOCOL_MINOR,
    PROTOCOL_VERSION,
    URL_CAPTURES,
    URL_STATUS,
)
from backstay_protocol.topology import LocalTier, Peer, PodIdentity, Tiers, Topology
from backstay_sidecar.agent import Agent
from backstay_sidecar.app import Applications, applications
from backstay_sidecar.auth import LimitBody, NeverRaise, RequireToken
from backstay_sidecar.routes import examples, health
from backstay_sidecar.settings import Settings

TOKEN = "0123456789abcdef0123"
OLD_TOKEN = "fedcba98765432100000"
Client = Callable[..., httpx.AsyncClient]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    tmp_path = tmp_path_factory.mktemp("agent")
    topology = Topology(
        namespace="ns",
        job="job",
        run_name="run",
        uid="uid",
        replicas=2,
        processes_per_replica=1,
        peers=(
            Peer(replica=0, address="127.0.0.1:1"),
            Peer(replica=1, address="127.0.0.1:2"),
        ),
        tiers=Tiers(local=LocalTier(root=str(tmp_path / "disk"))),
    )
    settings = Settings(
        topology=topology,
        pod=PodIdentity(replica=1),
        volume=str(tmp_path / "memory"),
        tokens=(TOKEN, OLD_TOKEN),
        listen_host="127.0.0.1",
        api_port=2,
        health_port=3,
    )
    agent = Agent(settings, SYSTEM_CLOCK)
    yield agent
    asyncio.run(agent.peers.close())


@pytest.fixture(scope="module")
def apps(agent: Agent) -> Applications:
    """Built once: it takes half a second."""
    return applications(agent)


@pytest.fixture
async def client(apps: Applications) -> AsyncIterator[Client]:
    opened = []

    def make(which: str = "api", token: str | None = TOKEN) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        transport = httpx.ASGITransport(getattr(apps, which))
        opened.append(httpx.AsyncClient(transport=transport, base_url="http://it", headers=headers))
        return opened[-1]

    yield make
    for each in opened:
        await each.aclose()


def error_of(response: httpx.Response) -> ErrorReply:
    assert response.headers["content-type"] == "application/json"
    return codec.loads(ErrorReply, response.content)


async def routes_of(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    document = (await client.get("/openapi.json")).json()
    return [
        (method.upper(), path.replace("{checkpoint}", "5-1").replace("{rank}", "0"))
        for path, methods in document["paths"].items()
        for method in methods
    ]


async def test_every_route_of_the_api_port_needs_the_token(client: Client) -> None:
    routes = await routes_of(client())
    assert len(routes) >= 20
    stranger, wrong = client(token=None), client(token="wrong-token-wrong-token")
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/nowhere")]:
        for caller in (stranger, wrong):
            response = await caller.request(method, path)
            assert response.status_code == 401, (method, path)
            if method != "HEAD":
                assert error_of(response).error.code == "Unauthorized"
                assert response.headers["www-authenticate"].startswith("Bearer")


async def test_both_tokens_are_taken_while_they_are_changed(client: Client) -> None:
    for token in (TOKEN, OLD_TOKEN):
        assert (await client(token=token).get(URL_STATUS)).status_code == 200


async def test_the_scheme_must_be_bearer(client: Client) -> None:
    response = await client(token=None).get(URL_STATUS, headers={"Authorization": f"Basic {TOKEN}"})
    assert response.status_code == 401


async def test_trainer_routes_are_not_on_the_api_port_nor_peer_routes_on_the_socket(
    client: Client,
) -> None:
    for which, path in (
        ("api", URL_CAPTURES),
        ("trainer", "/v1/replicas"),
        ("health", "/v1/status"),
    ):
        assert (await client(which).post(path, json={})).status_code == 404


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect"])
async def test_the_health_port_tells_nothing_of_its_interface(client: Client, path: str) -> None:
    answer = await client("health", token=None).get(path)
    assert answer.status_code == 404
    assert "openapi" not in error_of(answer).error.hint


async def test_the_health_port_has_four_routes_and_no_token(agent: Agent, client: Client) -> None:
    caller = client("health", token=None)
    paths = {route.path for route in health.router(agent).routes if isinstance(route, APIRoute)}
    assert paths == {"/healthz", "/readyz", "/prestop", "/metrics"}
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await caller.get(path)).status_code == 200
    assert "backstay_tier_ok" in (await caller.get("/metrics")).text


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "says"),
    [
        pytest.param("GET", "/v1/nothing", None, 404, "NotFound", "/v1/nothing", id="no route"),
        pytest.param("PUT", URL_STATUS, None, 405, "MethodNotAllowed", "PUT", id="method"),
        pytest.param("POST", "/v1/round/store", b"{", 422, "InvalidRequest", "JSON", id="no json"),
        pytest.param(
            "POST", "/v1/round/store", b"{}", 422, "InvalidRequest", "body.round", id="field"
        ),
        pytest.param(
            "GET", "/v1/checkpoints/5-1/shards/x", None, 422, "InvalidRequest", "rank", id="rank"
        ),
        pytest.param(
            "GET", "/v1/checkpoints/5-1/shards/0", None, 404, "NotFound", "replica 1", id="no shard"
        ),
        pytest.param(
            "GET", "/v1/checkpoints/5-x/shards/0", None, 404, "NotFound", "5-x", id="bad name"
        ),
        pytest.param(
            "GET",
            "/v1/checkpoints/5-1/shards/0?tier=cloud",
            None,
            400,
            "InvalidRequest",
            "cloud",
            id="no such tier",
        ),
        pytest.param(
            "GET",
            "/v1/checkpoints/5-1/shards/0?tier=remote",
            None,
            400,
            "InvalidRequest",
            "not served here",
            id="remote",
        ),
        pytest.param(
            "PUT",
            "/v1/policy",
            b'{"every_steps":5}',
            409,
            "NotLeader",
            "does not lead",
            id="not the leader",
        ),
        pytest.param("GET", "/v1/job", None, 503, "Unreachable", "refused", id="leader away"),
    ],
)
async def test_every_error_has_the_one_shape(
    client: Client, method: str, path: str, body: bytes | None, status: int, code: str, says: str
) -> None:
    headers = {"Content-Type": "application/json"} if body else {}
    response = await client().request(method, path, content=body, headers=headers)
    error = error_of(response).error
    assert (response.status_code, error.code) == (status, code)
    assert says in error.message


async def test_a_fault_of_ours_is_told_in_the_one_shape_and_logged(
    agent: Agent, client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> AgentStatus:
        raise RuntimeError("a surprise")

    monkeypatch.setattr(agent, "status", broken)
    response = await client().get(URL_STATUS)
    assert response.status_code == 500
    assert error_of(response).error.message == "RuntimeError: a surprise"
    assert [record.exc_info is not None for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (PROTOCOL_VERSION, 200),
        (f"1.{PROTOCOL_MINOR + 1}", 200),
        ("2.0", 426),
        ("1.9", 426),
        ("one", 400),
    ],
)
async def test_other_protocol_versions_are_refused_by_name(
    client: Client, given: str, status: int
) -> None:
    response = await client().get(URL_STATUS, headers={HEADER_PROTOCOL: given})
    assert response.status_code == status
    assert response.headers[HEADER_PROTOCOL] == PROTOCOL_VERSION
    if status != 200:
        assert given in error_of(response).error.message


async def test_a_body_over_the_limit_is_refused_before_it_is_read(client: Client) -> None:
    response = await client().post("/v1/round/store", content=b"x" * (16 << 20) + b"y")
    assert response.status_code == 413
    assert "16777217 bytes" in error_of(response).error.message


async def test_a_body_that_grows_beyond_the_limit_is_cut_off() -> None:
    sent = await _call(LimitBody(_never, limit=10), [b"12345", b"67890", b"1"])
    assert sent[0]["status"] == 413


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    sent = await _call(LimitBody(_never, seconds=0.01), [b"1"], silent=True)
    assert sent[0]["status"] == 408


async def test_an_error_after_the_start_of_an_answer_only_breaks_it_off() -> None:
    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("in the middle")

    sent = await _call(NeverRaise(half), [])
    assert [message["type"] for message in sent] == ["http.response.start"]


async def test_no_token_is_no_token() -> None:
    sent = await _call(RequireToken(_never, (TOKEN,)), [], headers=[(b"authorization", b"Bearer ")])
    assert sent[0]["status"] == 401


async def _never(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("the application must not be reached")


async def _call(
    app: Any, pieces: list[bytes], *, silent: bool = False, headers: Any = ()
) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": p, "more_body": True} for p in pieces]

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.sleep(60 if silent else 0)
            return {"type": "http.disconnect"}
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
    await app(scope, receive, send)
    return sent


async def test_a_skipped_save_is_told_to_people(agent: Agent, client: Client) -> None:
    notice = CaptureNotice(rank=1, slot=-1, step=7, attempt=1, published=False, why="no free slot")
    response = await client("trainer", token=None).post(
        URL_CAPTURES, content=codec.dumps(notice), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 200
    listener = agent.events.listen(after=0)
    event = await anext(listener)
    await listener.aclose()
    assert (event.kind, event.fields["message"]) == ("save_skipped", "no free slot")


@pytest.mark.parametrize("which", ["api", "trainer"])
async def test_openapi_documents_each_route_with_the_error_shape(
    client: Client, which: str
) -> None:
    document = (await client(which).get("/openapi.json")).json()
    assert "ErrorReply" in document["components"]["schemas"]
    assert "HTTPValidationError" not in document.get("components", {}).get("schemas", {})
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], (method, path)
            done = {s: answer for s, answer in operation["responses"].items() if s[0] == "2"}
            for answer in done.values():
                content = answer.get("content", {}).get("application/json")
                assert not content or {"schema", "example"} <= set(content), (method, path)


async def test_each_message_on_the_wire_has_an_example(client: Client) -> None:
    document = (await client().get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body is not None:
                assert body["schema"].get("examples") or body.get("examples"), (method, path)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(value, id=name)
        for name, value in vars(examples).items()
        if name.isupper() and is_dataclass(value) and not isinstance(value, CheckpointId)
    ],
)
def test_each_example_survives_the_codec(example: Any) -> None:
    assert codec.loads(type(example), codec.dumps(example)) == example


def test_the_url_in_an_example_names_its_own_checkpoint() -> None:
    decision = examples.RESTORE_REPLY.decision
    assert decision is not None
    (source,) = decision.shards[0].sources
    assert f"/{decision.base}/" in source.url
    assert f"/{decision.base}/" in source.manifest_url


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/pin"),
        ("DELETE", "/pin"),
        ("POST", "/persist"),
        ("DELETE", ""),
    ],
)
async def test_what_the_leader_refuses_is_refused_at_any_sidecar(
    agent: Agent, client: Client, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    asked: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        error = ErrorBody(code="Conflict", message="it is pinned", hint="unpin it")
        return httpx.Response(409, content=codec.dumps(ErrorReply(error=error)))

    async def listed() -> CheckpointList:
        return examples.CHECKPOINT_LIST

    leader = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(agent.peers, "_client", leader)
    monkeypatch.setattr(agent.whole_job, "checkpoints", listed)
    url = f"/v1/checkpoints/{examples.CHECKPOINT}{path}"
    response = await client().request(method, url)
    assert (response.status_code, error_of(response).error.message) == (409, "it is pinned")
    assert asked == [(method, url)]
    await leader.aclose()


def test_an_attempt_that_began_has_the_neighbour_offered_everything_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[bool] = []
    monkeypatch.setattr(agent.replicator, "offer_again", lambda: offered.append(True))
    agent._began(7, None)
    assert offered == [True]
