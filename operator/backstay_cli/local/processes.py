"""Processes under shims, as the runner sees them: start, ask to end, kill, be told of the end.

`start` must be called in the runner's main thread: the kernel ties a shim's life to the thread that
forked it. No thread and no polling here: a shim reports through a pipe that the loop watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SHIM = Path(__file__).with_name("shim.py")


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One program to run."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    log: str
    """Its output is appended here."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a program ended."""

    code: int
    """128 + signal where a signal ended it."""
    signal: int

    @property
    def reason(self) -> str:
        """In words."""
        if self.signal:
            return f"Killed by signal {self.signal} ({signal.Signals(self.signal).name})"
        return "Completed" if self.code == 0 else "Error"


_living: set[int] = set()


def living_shims() -> frozenset[int]:
    """Process ids of all shims of this process that were not reaped yet."""
    return frozenset(_living)


class Process:
    """One running shim and its program."""

    def __init__(self, spec: ProcessSpec, on_exit: Callable[[Exit], None]) -> None:
        """Start it; `on_exit` is called once, in the loop, when nothing of it runs any more."""
        assert threading.current_thread() is threading.main_thread(), "shims die with their thread"
        self.spec = spec
        self.pid = 0
        """The program's; 0 until the shim has reported it."""
        self.ended = asyncio.Event()
        self._on_exit = on_exit
        self._exit: Exit | None = None
        self._unread = b""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            self._shim = _start(spec, writing)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        _living.add(self._shim.pid)
        self._reading = reading
        os.set_blocking(reading, False)
        asyncio.get_running_loop().add_reader(reading, self._read)

    @property
    def shim_pid(self) -> int:
        """Root of everything that belongs to it."""
        return self._shim.pid

    def terminate(self) -> None:
        """Ask the program to end (SIGTERM); it may take its time."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End everything of it at once."""
        self._signal(signal.SIGTERM)

    async def stop(self, grace_seconds: float) -> None:
        """Ask, wait, kill, and wait until nothing is left."""
        if grace_seconds > 0:
            self.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self.ended.wait()
        self.kill()
        await self.ended.wait()

    def _signal(self, number: signal.Signals) -> None:
        if not self.ended.is_set():  # not yet reaped, so the pid is still the shim's
            self._shim.send_signal(number)

    def _read(self) -> None:
        try:
            data = os.read(self._reading, 4096)
        except BlockingIOError:
            return
        if not data:
            self._finish()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._heard(json.loads(line))

    def _heard(self, said: dict[str, int]) -> None:
        if "started" in said:
            self.pid = said["started"]
        else:
            number = said["signal"]
            self._exit = Exit(code=128 + number if number else said["exit"], signal=number)

    def _finish(self) -> None:
        """The shim is gone: it alone holds the other end of the pipe."""
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        self._shim.wait()
        _living.discard(self._shim.pid)
        self.ended.set()
        killed = Exit(code=128 + signal.SIGKILL, signal=signal.SIGKILL)  # somebody killed the shim
        self._on_exit(self._exit or killed)


def _start(spec: ProcessSpec, report: int) -> subprocess.Popen[bytes]:
    os.makedirs(os.path.dirname(spec.log), exist_ok=True)
    shim = [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), str(report), "--"]
    with open(spec.log, "ab") as log:
        return subprocess.Popen(
            [*shim, *spec.argv],
            env=dict(spec.env),
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(report,),
            start_new_session=True,
        )
