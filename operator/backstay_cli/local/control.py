"""Orders for a running job from other terminals: one JSON line each way over a unix socket."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from backstay_cli.errors import CommandError, NoAnswer
from backstay_protocol import codec
from backstay_protocol.errors import ProtocolError

_MOST_BYTES = 64 << 10
_PATIENCE_SECONDS = 60.0
FAILURES = ("trainer", "memory", "node", "all")


@dataclass(frozen=True, kw_only=True)
class FailOrder:
    """`backstay local fail`."""

    failure: str
    replica: int = -1
    """-1: any."""
    local_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class OrderReply:
    """What was done, or why not."""

    ok: bool
    text: str


class ControlServer:
    """The runner's end."""

    def __init__(self, path: Path, carry_out: Callable[[FailOrder], Awaitable[OrderReply]]) -> None:
        """`carry_out` answers each order; it must not raise for a wrong one."""
        self._path = path
        self._carry_out = carry_out
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen; only this user may connect."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(
            self._serve, path=str(self._path), limit=_MOST_BYTES
        )
        os.chmod(self._path, 0o600)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                line = await reader.readline()
            writer.write(codec.dumps(await self._answer(line)) + b"\n")
            await writer.drain()
        except (OSError, ValueError, TimeoutError):
            return  # whoever asked has gone, or sent no line
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> OrderReply:
        try:
            order = codec.loads(FailOrder, line)
        except ProtocolError as error:
            return OrderReply(ok=False, text=str(error))
        return await self._carry_out(order)


def send_order(path: Path, order: FailOrder) -> str:
    """Give an order and wait for what was done. Raises CommandError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_PATIENCE_SECONDS)
            sock.connect(str(path))
            sock.sendall(codec.dumps(order) + b"\n")
            with sock.makefile("rb") as answers:
                line = answers.readline()
    except OSError as error:
        raise NoAnswer(f"the job's runner does not answer: {error}") from error
    if not line:
        raise NoAnswer("the job's runner ended before it answered")
    reply = codec.from_plain(OrderReply, json.loads(line))
    if not reply.ok:
        raise CommandError(reply.text)
    return reply.text
