"""Starts ranks quickly: one process imports torch and backstay once and forks a process per rank.

The ranks are real processes: killed with -9, waited for, with an environment and a log of their
own. Used by support.training_job; one nursery a session and build. It ends with the tests, its
ranks with it.

    rank = nursery().start(["--out", ...], env={...}, log=path)
    rank.kill(), rank.poll(), rank.wait(30)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
START_SECONDS = 180.0
_KILL_ME_WITH_MY_PARENT = 1


class Rank:
    """One forked process, with the part of Popen's interface that tests need."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid

    def poll(self) -> int | None:
        """Exit code (negative: a signal), None while it runs."""
        return self._nursery.code(self.pid)

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, f"process {self.pid} did not end"
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The side of the tests."""

    def __init__(self, build: str) -> None:
        ours, theirs = socket.socketpair()
        path = [*filter(None, [build]), str(TESTS)]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._socket = ours
        self._stream = ours.makefile("rw")
        self._codes: dict[int, int] = {}
        self._ask({"ready": True})

    def start(self, arguments: Sequence[str], *, env: Mapping[str, str], log: Path) -> Rank:
        """A rank that runs support/tiny_training.py. `env` is its whole environment."""
        answer = self._ask({"arguments": list(arguments), "env": dict(env), "log": str(log)})
        return Rank(self, answer["pid"])

    def code(self, pid: int) -> int | None:
        if pid not in self._codes:
            for ended, code in self._ask({"ended": True})["codes"].items():
                self._codes[int(ended)] = code
        return self._codes.get(pid)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._stream.close()
        self._socket.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._stream.write(json.dumps(request) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        assert line, "the nursery has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


_nurseries: dict[str, Nursery] = {}


def nursery(build: str = "") -> Nursery:
    """The session's nursery. `build`: where another build's packages are, as in PYTHONPATH."""
    if build not in _nurseries:
        _nurseries[build] = Nursery(build)
    return _nurseries[build]


def end_nursery() -> None:
    """At the end of a session (tests/integration/conftest.py)."""
    while _nurseries:
        _nurseries.popitem()[1].close()


# --- the nursery's own process --------------------------------------------------------------------


def serve(descriptor: int, parent: int) -> None:
    """Answer requests one by one until the other side is gone."""
    ctypes.CDLL(None).prctl(_KILL_ME_WITH_MY_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    from support import tiny_training

    stream = socket.socket(fileno=descriptor).makefile("rw")
    while line := stream.readline():
        request = json.loads(line)
        if "arguments" in request:
            answer: dict[str, Any] = {"pid": fork(tiny_training, request, descriptor)}
        else:
            answer = {"codes": ended()}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


def fork(tiny_training: Any, request: dict[str, Any], descriptor: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.close(descriptor)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv[1:] = request["arguments"]
        from backstay_protocol import faults

        faults.arm(os.environ.get("BACKSTAY_FAULTS", ""))
        tiny_training.main()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException:  # noqa: BLE001 - as the interpreter does at its top
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def ended() -> dict[int, int]:
    codes = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if not pid:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
