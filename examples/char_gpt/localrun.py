"""`backstay local run`, `fail` and `pull` as a program uses them. Used by demo.py."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from examples.char_gpt.incidents import Event, Failure
from examples.char_gpt.losses import ENV_LOSSES

SILENT_SECONDS = 300.0
STOP_SECONDS = 60.0
COMMAND_SECONDS = 120.0
PULL_TRIES = 3
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
EXIT_UNREACHABLE = 5  # of the command, see `backstay --help`


def _end_with_the_demo() -> None:
    """In the child: have Linux send SIGTERM when the demo is gone, even by kill -9."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class DemoFailed(Exception):
    """The demo can't go on; the message says why and where to look."""


class Unreachable(DemoFailed):
    """A store or sidecar did not answer; another try may help."""


class Backstay:
    """The command, with a state folder of the demo's own, kept apart from a user's."""

    def __init__(self, state: Path) -> None:
        self._command = (str(Path(sys.executable).with_name("backstay")),)
        self._environment = os.environ | {"BACKSTAY_HOME": str(state)}

    def start(self, manifest: Path, losses: Path, errors: Path) -> LocalRun:
        """Start a job; its trainer writes to `losses`, the runner's own complaints to `errors`."""
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [*self._command, "local", "run", str(manifest), "-o", "json"],
                env=self._environment | {ENV_LOSSES: str(losses)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the demo, which stops the run in order
                preexec_fn=_end_with_the_demo,
            )
        return LocalRun(process, errors)

    def fail(self, job: str, failure: Failure) -> None:
        """Break a running job."""
        which = [] if failure.replica is None else ["--replica", str(failure.replica)]
        self._run("local", "fail", failure.kind, "--job", job, *which)

    def pull(self, job: str, folder: Path) -> None:
        """Fetch the newest checkpoint of a job."""
        words = ("pull", "--job", job, "--step", "latest", "--out", str(folder))
        for left in reversed(range(PULL_TRIES)):
            try:
                self._run(*words)
            except Unreachable:
                if not left:
                    raise
            else:
                return

    def _run(self, *words: str) -> None:
        done = subprocess.run(
            [*self._command, *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if done.returncode:
            kind = Unreachable if done.returncode == EXIT_UNREACHABLE else DemoFailed
            raise kind(
                f"`backstay {' '.join(words)}` ended with exit code {done.returncode}:\n"
                f"{done.stdout}{done.stderr}"
            )


class LocalRun:
    """One job that runs."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process = process
        self._errors = errors
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def events(self) -> Iterator[Event]:
        """Its events until it ends. Raises DemoFailed when it is silent for too long, or fails."""
        while True:
            try:
                line = self._lines.get(timeout=SILENT_SECONDS)
            except queue.Empty:
                raise DemoFailed(
                    f"the job has said nothing for {SILENT_SECONDS:.0f} s; see {self._errors}"
                ) from None
            if line is None:
                break
            yield json.loads(line)
        if self._process.wait():
            tail = self._errors.read_text(errors="replace")[-2000:]
            raise DemoFailed(f"the job ended with exit code {self._process.returncode}\n{tail}")

    def stop(self) -> None:
        """End it if it still runs; it takes all its processes with it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(STOP_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.strip():
                    self._lines.put(line)
        self._lines.put(None)
