"""Wiring: settings, logging, sockets, signals; three listeners in one event loop.

`main()` is what `python -m backstay_sidecar` and `backstay agent` run. Exit codes: 0 after SIGTERM
or SIGINT (or when the parent is gone), 2 for what a person must mend before it can start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from backstay_protocol import codec
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.errors import BackstayError
from backstay_protocol.files import make_folder, open_shared
from backstay_protocol.layout import MemoryLayout
from backstay_protocol.names import ENV_LOG_FORMAT
from backstay_sidecar.agent import Agent
from backstay_sidecar.app import applications
from backstay_sidecar.auth import Application
from backstay_sidecar.errors import SettingsError
from backstay_sidecar.logs import Logs
from backstay_sidecar.settings import Settings, read_settings
from backstay_sidecar.zerocopy import ZeroCopyProtocol

BACKLOG = 1024
KEEP_ALIVE_SECONDS = 75
DRAIN_SECONDS = 5.0  # at SIGTERM: for what waits in tiers that work
SHUTDOWN_SECONDS = 3  # for requests under way
LOCK_SECONDS = 10.0  # for an earlier sidecar on this volume to end
SOCKET_MODE = 0o660
EXIT_SETTINGS = 2
FLUSH_SECONDS = 2.0
TERMINATION_LOG = "/dev/termination-log"  # the kubelet makes it, and shows what is in it

log = logging.getLogger("backstay.main")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until told to stop, then exit the process."""
    logs = Logs(os.environ.get(ENV_LOG_FORMAT, ""))
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    except SettingsError as error:
        _refuse(error, logs)
        raise SystemExit(EXIT_SETTINGS) from error
    topology = settings.topology
    logs.belong_to(topology.namespace, topology.job, settings.replica, settings.secrets)
    try:
        asyncio.run(serve(settings, logs))
    except SettingsError as error:
        log.error("%s", error)
        raise SystemExit(EXIT_SETTINGS) from error
    log.info("stopped")
    logging.shutdown()
    # A thread that hangs in a sick disk would be waited for by the interpreter, for ever.
    os._exit(0)


def _refuse(error: SettingsError, logs: Logs) -> None:
    """A person reads it in a terminal, or a collector of logs does."""
    if logs.as_json:
        log.error("%s", error)
    else:
        print(f"backstay agent: {error}", file=sys.stderr)


async def serve(settings: Settings, logs: Logs) -> None:
    """Open the listeners, work, and stop in order. Raises SettingsError."""
    layout = MemoryLayout(settings.volume)
    stop = _Stop(settings.exit_with_parent)
    with _own_volume(layout), contextlib.ExitStack() as sockets:
        agent = Agent(settings, SYSTEM_CLOCK)
        logs.follow(agent.where)
        apps = applications(agent)
        unix = sockets.enter_context(_unix_socket(layout.socket))
        api = sockets.enter_context(_tcp_socket(settings.listen_host, settings.api_port))
        health = sockets.enter_context(_tcp_socket(settings.listen_host, settings.health_port))
        try:
            await agent.start()
        except OSError as error:
            raise SettingsError(f"the memory volume can't be used: {error}") from error
        servers = [
            _Server(apps.trainer, unix),
            _Server(apps.api, api),
            _Server(apps.health, health),
        ]
        tasks = [asyncio.create_task(server.run_on_socket()) for server in servers]
        log.info(
            "listening on %s, %s:%d and %s:%d (health)",
            layout.socket,
            *api.getsockname()[:2],
            *health.getsockname()[:2],
        )
        flushing = asyncio.create_task(_flush(agent, stop)) if settings.flush else None
        await stop.wait(tasks)
        if flushing is not None:
            flushing.cancel()
        await _drain(agent, stop)
        _leave_word(agent)
        agent.stopping.set()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)
        await agent.stop()


async def _drain(agent: Agent, stop: _Stop) -> None:
    """What was saved is moved on before the end, where that takes a moment only."""
    if agent.replicator.idle or stop.again.is_set():
        return
    log.info("stopping; first moving what waits, for at most %g s", DRAIN_SECONDS)
    drained = asyncio.create_task(agent.drained())
    again = asyncio.create_task(stop.again.wait())
    await asyncio.wait((drained, again), timeout=DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, again):
        task.cancel()
    await asyncio.gather(drained, again, return_exceptions=True)


async def _flush(agent: Agent, stop: _Stop) -> None:
    """Until nothing is left to bring out; the others may still ask this one for a while.

    The leader that was asked to bring the last checkpoint out is dead: each asks this one again.
    """
    while not await agent.ending.flushed():
        with contextlib.suppress(BackstayError, OSError):
            await agent.whole_job.flush()
        await asyncio.sleep(FLUSH_SECONDS)
    await asyncio.sleep(3 * FLUSH_SECONDS)
    stop.tell("the last checkpoint is durable")


def _leave_word(agent: Agent) -> None:
    """Tell the operator what became of the last checkpoint: soon nobody can ask any more."""
    word = agent.ending.last_word()
    if word is None or not os.path.exists(TERMINATION_LOG):
        return
    with contextlib.suppress(OSError), open(TERMINATION_LOG, "wb") as file:
        file.write(codec.dumps(word))


class _Server(uvicorn.Server):
    """One listener. Signals are handled once, for all of them, not by uvicorn."""

    def __init__(self, app: Application, listener: socket.socket) -> None:
        self._listener = listener
        super().__init__(
            uvicorn.Config(
                app,
                http=ZeroCopyProtocol,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )

    async def run_on_socket(self) -> None:
        """Serve until `should_exit`."""
        await self.serve(sockets=[self._listener])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


class _Stop:
    """Why the process should end: a signal, its parent's end, or a listener that died."""

    def __init__(self, exit_with_parent: bool) -> None:
        self.again = asyncio.Event()
        """Told to stop a second time: at once."""
        self._told = asyncio.Event()
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.tell, signal.Signals(number).name)
        if exit_with_parent:
            self._watch_parent()

    async def wait(self, servers: Sequence[asyncio.Task[None]]) -> None:
        """Until there is a reason."""
        told = asyncio.create_task(self._told.wait())
        await asyncio.wait((told, *servers), return_when=asyncio.FIRST_COMPLETED)
        told.cancel()

    def tell(self, why: str) -> None:
        """End now, for this reason."""
        if self._told.is_set():
            self.again.set()
        log.info("told to stop: %s", why)
        self._told.set()

    def _watch_parent(self) -> None:
        parent = os.getppid()
        try:
            descriptor = os.pidfd_open(parent)
        except ProcessLookupError:
            self.tell("the parent is gone")
            return
        if os.getppid() != parent:
            self.tell("the parent is gone")
            return
        self._loop.add_reader(descriptor, self._parent_gone, descriptor)

    def _parent_gone(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        self.tell("the parent is gone")
        self.again.set()


@contextmanager
def _own_volume(layout: MemoryLayout) -> Iterator[None]:
    """One sidecar per memory volume. An earlier one that is just ending is waited for."""
    try:
        make_folder(layout.ranks)
        path = f"{layout.root}/agent.lock"
        descriptor = open_shared(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise SettingsError(f"the memory volume {layout.root} can't be used: {error}") from error
    try:
        deadline = SYSTEM_CLOCK.monotonic() + LOCK_SECONDS
        while not _try_lock(descriptor):
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise SettingsError(
                    f"another sidecar runs on the memory volume {layout.root}; stop it first"
                )
            SYSTEM_CLOCK.sleep(0.1)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _unix_socket(path: str) -> Iterator[socket.socket]:
    """Listen at `path`; a stale socket there is replaced in one step."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            _bind_in_place(listener, path)
        except OSError as error:
            raise SettingsError(f"can't listen on {path}: {error}") from error
        yield listener
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    finally:
        listener.close()


def _bind_in_place(listener: socket.socket, path: str) -> None:
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The kernel takes 107 bytes of path; through the folder's descriptor any length will do.
        temporary = f"agent-{os.getpid()}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        listener.bind(f"/proc/self/fd/{folder}/{temporary}")
        os.chmod(temporary, SOCKET_MODE, dir_fd=folder)
        listener.listen(BACKLOG)
        os.rename(temporary, os.path.basename(path), src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


@contextmanager
def _tcp_socket(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(f"can't listen on {host}:{port}: {error}") from error
    assert kind == socket.SOCK_STREAM
    try:
        yield listener
    finally:
        listener.close()
