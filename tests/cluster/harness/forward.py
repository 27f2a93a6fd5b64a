"""Forwards connections from the loopback interface into a network namespace.

Run as: python -m cluster.harness.forward NETNS_FILE LISTEN_PORT TARGET_PORT

The listening socket is made in the machine's own namespace. The process then
moves into the other one, so that its outgoing connections start there.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from cluster.harness.linux import CLONE_NEWNET, setns


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def _serve(listener: socket.socket, port: int) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        except OSError:
            pass
        finally:
            writer.close()
            if far_writer:
                far_writer.close()

    server = await asyncio.start_server(handle, sock=listener)
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    netns, listen_port, target_port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    listener = socket.create_server(("127.0.0.1", listen_port), backlog=128)
    setns(netns, CLONE_NEWNET)
    asyncio.run(_serve(listener, target_port))


if __name__ == "__main__":
    main()
