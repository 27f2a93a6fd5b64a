"""Runs `backstay local run` as a real process for tests, reads its events, finds what it left.

Every process of a run inherits a mark in its environment; `survivors(mark)` finds all that carry
it, whatever they forked, double-forked or renamed themselves to.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAKES = Path(__file__).parent / "local_fakes"
ENV_MARK = "LOCAL_RUN_MARK"
DEADLINE_SECONDS = 40.0

Event = dict[str, Any]


def survivors(mark: str) -> list[str]:
    """Command lines of the living processes that carry the mark (zombies don't live)."""
    wanted = f"{ENV_MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environ = Path(f"/proc/{name}/environ").read_bytes()
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if wanted in environ.split(b"\0"):
            found.append(f"{name} {command.replace(bytes(1), b' ').decode()}")
    return found


def wait_until(what: Callable[[], bool], seconds: float = DEADLINE_SECONDS) -> None:
    """Wait for something that has no event; fails at the deadline."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "the deadline has passed"
        time.sleep(0.05)


def manifest(folder: Path, **changes: Any) -> Path:
    """A job of fake trainers without a launcher; `changes` are of the spec."""
    trainer = [sys.executable, str(FAKES / "trainer.py"), str(folder / "state" / "fake")]
    steps, pause = str(changes.pop("steps", 10_000)), str(changes.pop("pause", 0.05))
    extra = changes.pop("arguments", [])
    command = changes.pop("command", [*trainer, steps, pause, *extra])
    container = {"name": "trainer", "command": command}
    tree = {
        "apiVersion": "backstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": changes.pop("name", "fake")},
        "spec": {
            "replicas": 2,
            "launcher": "none",
            "podTemplate": {"spec": {"containers": [container]}},
            "checkpoint": {
                "memory": {"everySteps": 5, "sizeLimit": "16Mi"},
                "local": {},
                "neighbor": {},
            },
            **changes,
        },
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return path


def _die_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class LocalRun:
    """One `backstay local run -o json`, with the fake sidecar in place of the real one."""

    def __init__(
        self,
        job: Path,
        *options: str,
        fakes: bool = True,
        env: dict[str, str] | None = None,
        patience_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """Starts at once; the state folder is `state` beside the manifest."""
        self.mark = uuid.uuid4().hex
        self._patience = patience_seconds
        self.state = job.parent / "state"
        self.seen: list[Event] = []
        environment = {
            **os.environ,
            ENV_MARK: self.mark,
            "BACKSTAY_HOME": str(job.parent / "home"),
            **({"PYTHONPATH": str(FAKES)} if fakes else {}),
            **(env or {}),
        }
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "backstay_cli.main", "local", "run", str(job)),
                *("-o", "json", "--state-dir", str(self.state), *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_the_tests,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, kind: str, **fields: Any) -> Event:
        """The next event of this kind and these fields."""
        deadline = time.monotonic() + self._patience
        while True:
            event = self._next(deadline, f"{kind} {fields}")
            if event["event"] == kind and fields.items() <= event.items():
                return event

    def _next(self, deadline: float, wanted: str) -> Event:
        try:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"no {wanted} in time; seen: {self.story()}") from None
        if line is None:
            errors = self.process.stderr.read() if self.process.stderr else ""
            raise AssertionError(f"ended before {wanted}; seen: {self.story()}\n{errors}")
        event: Event = json.loads(line)
        self.seen.append(event)
        return event

    def finish(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + self._patience
        while (line := self._lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
            self.seen.append(json.loads(line))
        return self.process.wait(timeout=self._patience)

    def story(self) -> str:
        """All events so far."""
        return "\n".join(json.dumps(event) for event in self.seen)

    def of_kind(self, kind: str) -> list[Event]:
        """All of a kind so far."""
        return [event for event in self.seen if event["event"] == kind]

    def status(self) -> dict[str, Any]:
        """status.json."""
        found: dict[str, Any] = json.loads((self.state / "status.json").read_text())
        return found

    def fail(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`backstay local fail` from another terminal."""
        return command("local", "fail", *arguments, "--state-dir", str(self.state))

    def close(self) -> None:
        """Kill it hard, and all that it should not have left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        for line in survivors(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(f"/dev/shm/backstay-{self.status()['uid'][:8]}")


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """One call of the command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "backstay_cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **env},
        check=False,
    )
