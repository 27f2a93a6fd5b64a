"""The leader over HTTP: who does not answer, who says that the token is wrong, or the version."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from backstay_operator import leaders as module
from backstay_operator.leaders import HttpLeaders


class Answers:
    """Answers every request with one status and body."""

    status = "200 OK"
    body = b"{}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {self.status}\r\ncontent-length: {len(self.body)}\r\nconnection: close"
        writer.write(head.encode() + b"\r\n\r\n" + self.body)
        await writer.drain()
        writer.close()


@pytest.fixture
async def answers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Answers]:
    answers = Answers()
    server = await asyncio.start_server(answers.serve, "127.0.0.1", 0)
    monkeypatch.setattr(module, "PORT_API", server.sockets[0].getsockname()[1])
    yield answers
    server.close()
    await server.wait_closed()


async def test_a_wrong_token_is_told_apart_from_no_answer(answers: Answers) -> None:
    leaders = HttpLeaders()
    try:
        answers.status = "401 Unauthorized"
        assert await leaders.job("127.0.0.1", "token") is None
        assert leaders.refused == {"127.0.0.1"}
        answers.status = "503 Service Unavailable"
        assert await leaders.job("127.0.0.1", "token") is None
        assert leaders.refused == set()
    finally:
        await leaders.close()


async def test_a_host_that_refused_a_token_is_forgotten_when_nobody_answers_there() -> None:
    """Another pod may get the address: of this job on the host's network, or of another job."""
    leaders = HttpLeaders()
    leaders.refused.add("127.0.0.1")
    try:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            port = nobody.getsockname()[1]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "PORT_API", port)
                assert await leaders.job("127.0.0.1", "token") is None
        assert leaders.refused == set()
    finally:
        await leaders.close()


async def test_a_leader_of_a_version_too_far_away_is_named_once(
    answers: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    leaders = HttpLeaders()
    try:
        answers.status = "426 Upgrade Required"
        answers.body = b'{"error": {"code": "VersionMismatch", "message": "it speaks 1.9"}}'
        for _ in range(2):
            assert await leaders.job("127.0.0.1", "token") is None
        (line,) = caplog.messages
        assert "it speaks 1.9" in line
        answers.status = "503 Service Unavailable"
        await leaders.job("127.0.0.1", "token")
        answers.status = "426 Upgrade Required"
        await leaders.job("127.0.0.1", "token")
        assert len(caplog.messages) == 2
    finally:
        await leaders.close()
