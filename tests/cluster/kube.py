"""A thin client of the cluster under test: kubectl in a subprocess, plain dicts in and out.

What waits says at its end what it saw: pods, events and the last lines of logs of the namespace.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Object = dict[str, Any]
Result = TypeVar("Result")
LOG_LINES = 25
PAUSE_SECONDS = 0.2


class KubectlError(AssertionError):
    """kubectl ended with an error; its words are the message."""


@dataclass(frozen=True)
class Kube:
    """kubectl with one kubeconfig."""

    program: str
    kubeconfig: Path

    def run(self, *argv: str, stdin: str | None = None, timeout: float = 90) -> str:
        """What kubectl prints; KubectlError if it fails."""
        done = self.process(*argv, stdin=stdin, timeout=timeout)
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def process(
        self, *argv: str, stdin: str | None = None, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl, whatever comes of it."""
        return subprocess.run(
            self.command(*argv), input=stdin, capture_output=True, text=True, timeout=timeout
        )

    def command(self, *argv: str) -> list[str]:
        """The command line, for what has to run in the background."""
        return [self.program, f"--kubeconfig={self.kubeconfig}", *argv]

    # --- objects ---------------------------------------------------------------------------

    def apply(self, *documents: Object, namespace: str = "default") -> None:
        """Server-side apply, all in one call."""
        listing = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)})
        self.run(
            "apply", "--server-side", "--force-conflicts", "-n", namespace, "-f", "-",
            stdin=listing,
        )  # fmt: skip

    def create(self, document: Object, namespace: str = "default") -> Object:
        """Create one object; KubectlError holds what the API server says against it."""
        text = self.run(
            "create", "-n", namespace, "-o", "json", "-f", "-", stdin=json.dumps(document)
        )
        return json.loads(text)

    def get(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        """One object, or None if there is none of that name."""
        text = self.run("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, namespace: str = "default", selector: str = "") -> list[Object]:
        """All objects of a kind in a namespace, or those with the labels."""
        text = self.run("get", kind, "-n", namespace, "-o", "json", "-l", selector)
        return json.loads(text)["items"]

    def patch(self, kind: str, name: str, change: Object, namespace: str = "default") -> None:
        """Merge a change into an object."""
        self.run("patch", kind, name, "-n", namespace, "--type=merge", "-p", json.dumps(change))

    def delete(self, kind: str, name: str, namespace: str = "default", *more: str) -> None:
        """Delete an object and wait until it is gone; fine if it was not there."""
        self.run("delete", kind, name, "-n", namespace, "--ignore-not-found", *more)

    @contextmanager
    def namespace(self, name: str, labels: dict[str, str] | None = None) -> Iterator[str]:
        """A namespace that is ready for pods, removed at the end with all that is in it."""
        meta = {"name": name, "labels": labels or {}}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        self.wait(
            f"the service account of namespace {name}",
            lambda: self.get("serviceaccount", "default", name),
            namespace=name,
        )
        try:
            yield name
        finally:
            self.delete("namespace", name, "default", "--wait=false")

    # --- inside pods -----------------------------------------------------------------------

    def exec(self, namespace: str, pod: str, *argv: str, container: str = "") -> str:
        """What a command in a container prints."""
        where = ["-c", container] if container else []
        return self.run("exec", "-n", namespace, pod, *where, "--", *argv)

    def logs(self, namespace: str, pod: str, container: str = "", lines: int = 200) -> str:
        """The last lines of a container's log."""
        where = ["-c", container] if container else []
        return self.run("logs", "-n", namespace, pod, *where, f"--tail={lines}")

    @contextmanager
    def port_forward(self, namespace: str, target: str, port: int) -> Iterator[int]:
        """A loopback port that leads to `target` (pod/x, service/x) while the block runs."""
        argv = self.command(
            "port-forward", "-n", namespace, "--address=127.0.0.1", target, f":{port}"
        )
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                assert process.stdout is not None
                words = process.stdout.readline().decode()
                if "127.0.0.1:" not in words:
                    raise KubectlError(f"port-forward to {target}: {words}")
                yield int(words.partition("127.0.0.1:")[2].split()[0])
            finally:
                process.kill()

    # --- waiting ---------------------------------------------------------------------------

    def wait(
        self,
        what: str,
        condition: Callable[[], Result],
        *,
        timeout: float = 60,
        namespace: str = "default",
    ) -> Result:
        """What the condition returns once it is true; AssertionError with a dump when it never is.

        An AssertionError within the condition counts as "not yet", its words are kept.
        """
        deadline = time.monotonic() + timeout
        said = ""
        while True:
            try:
                if result := condition():
                    return result
            except AssertionError as error:
                said = f"\nlast: {error}"
            if time.monotonic() > deadline:
                dump = self.dump(namespace)
                raise AssertionError(f"not within {timeout:.0f} s: {what}{said}\n{dump}")
            time.sleep(PAUSE_SECONDS)

    def wait_ready(self, namespace: str, *pods: str, timeout: float = 60) -> None:
        """Until these pods are Ready."""
        for pod in pods:
            self.wait(
                f"pod {pod} Ready",
                lambda pod=pod: is_true(self.get("pod", pod, namespace), "Ready"),
                timeout=timeout,
                namespace=namespace,
            )

    def dump(self, namespace: str) -> str:
        """What is going on in a namespace, for the message of a failed test."""
        try:
            return "\n".join(self._dump(namespace))
        except (KubectlError, subprocess.TimeoutExpired, ValueError) as error:
            return f"(no dump: {error})"

    def _dump(self, namespace: str) -> Iterator[str]:
        yield f"--- nodes\n{self.run('get', 'nodes', timeout=20)}"
        yield f"--- pods in {namespace}"
        pods = self.list("pods", namespace)
        for pod in pods:
            yield from _tell_pod(pod)
        yield f"--- events in {namespace}"
        events = self.process("events", "-n", namespace, timeout=20).stdout.splitlines()
        yield from events[-40:]
        for pod in pods:
            for status in _statuses(pod):
                yield from self._tail(namespace, pod["metadata"]["name"], status)

    def _tail(self, namespace: str, pod: str, status: Object) -> Iterator[str]:
        name, where = status["name"], ["-n", namespace, pod, "-c", status["name"]]
        wanted = {"": ["logs", *where]}
        if status["restartCount"]:
            wanted["before its last restart "] = ["logs", "--previous", *where]
        for when, argv in wanted.items():
            done = self.process(*argv, f"--tail={LOG_LINES}", timeout=20)
            if text := (done.stdout + done.stderr).strip():
                yield f"--- log of {pod}/{name} {when}\n{text}"


def is_true(document: Object | None, condition: str) -> bool:
    """Whether an object has this condition with status True."""
    conditions = ((document or {}).get("status") or {}).get("conditions") or []
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)


def _statuses(pod: Object) -> list[Object]:
    status = pod.get("status") or {}
    kinds = ("initContainerStatuses", "containerStatuses")
    return [entry for kind in kinds for entry in status.get(kind) or []]


def _tell_pod(pod: Object) -> Iterator[str]:
    meta, status = pod["metadata"], pod.get("status") or {}
    leaving = " (being deleted)" if "deletionTimestamp" in meta else ""
    node = pod["spec"].get("nodeName", "no node")
    words = [status.get("phase", "?"), status.get("reason", ""), status.get("message", "")]
    yield f"{meta['name']}{leaving} on {node}: {' '.join(filter(None, words))}"
    for condition in status.get("conditions") or []:
        if condition["status"] != "True" and condition.get("message"):
            yield f"    {condition['type']}: {condition['message']}"
    for entry in _statuses(pod):
        states = json.dumps({k: entry[k] for k in ("state", "lastState") if entry.get(k)})
        yield f"    {entry['name']}: restarts {entry['restartCount']}, {states[:600]}"
