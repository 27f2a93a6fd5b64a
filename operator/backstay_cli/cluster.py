"""A TrainingJob in a cluster, as the command reaches it: through `kubectl` and its port-forward.

Used by `where`. kubectl brings the person's own access (contexts, credential plugins, proxies), so
the command needs no Kubernetes client and no right beyond theirs: read the TrainingJob, its pods
and its token's Secret, and forward a port.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
import selectors
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from backstay_cli.errors import CommandError, NoAnswer, NotFound, UsageError
from backstay_operator.api.names import CRD_NAME, LABEL_GENERATION, LABEL_JOB, LABEL_REPLICA
from backstay_operator.manifests.objects import OPERATOR_LABELS, TOKEN_KEY, owned_name
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.messages import ReplicaView
from backstay_protocol.names import PORT_API

OPERATOR_SELECTOR = ",".join(f"{name}={value}" for name, value in OPERATOR_LABELS.items())
"""Of the operator's pods and ConfigMap, in whatever namespace the chart put them."""
_JOBS = CRD_NAME
_ANSWER_SECONDS = 60.0
_FORWARD_SECONDS = 30.0
_FORWARDING = re.compile(rb"Forwarding from (127\.0\.0\.1:\d+)")
_LOGGED = re.compile(r"[EWI]\d{4} \d\d:\d\d:")
"""A line of kubectl's own log, before what it says to people."""
_MISCONFIGURED = ("error: stat ", "context was not found", "does not exist", "current-context must")
_SHOWN = 6
_FORWARDS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Kubectl:
    """How kubectl is called."""

    namespace: str = ""
    """Empty: the context's."""
    context: str = ""
    kubeconfig: str = ""

    def get(self, *what: str) -> dict[str, Any]:
        """`kubectl get ... -o json`. Raises NotFound, NoAnswer or CommandError."""
        found: dict[str, Any] = json.loads(self.run("get", *what, "-o", "json"))
        return found

    def run(self, *arguments: str, given: str | None = None) -> str:
        """What kubectl prints; `given`: its standard input. Raises as `get`."""
        try:
            done = subprocess.run(
                [*self._command(), *arguments],
                input=given,
                capture_output=True,
                timeout=_ANSWER_SECONDS,
                check=False,
                text=True,
                errors="replace",
            )
        except FileNotFoundError as error:
            raise UsageError(
                "kubectl is not on the PATH", "a cluster is reached through it: install kubectl"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"kubectl gave no answer within {_ANSWER_SECONDS:.0f} s") from error
        if done.returncode == 0:
            return done.stdout
        words = "\n".join(line for line in done.stderr.splitlines() if not _LOGGED.match(line))
        raise _refusal(words.strip() or f"kubectl ended with {done.returncode}")

    @contextmanager
    def forward(self, pod: str, port: int) -> Iterator[str]:
        """`127.0.0.1:<port>` that leads to a port of a pod, for as long as the block runs."""
        command = [*self._command(), "port-forward", f"pod/{pod}", f":{port}"]
        command += ["--address", "127.0.0.1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                yield _address(process, pod)
            finally:
                process.kill()

    def secret(self, name: str) -> dict[str, str]:
        """A Secret's values."""
        data = self.get("secret", name).get("data") or {}
        return {key: _decoded(name, key, value) for key, value in data.items()}

    def inside(self, namespace: str) -> Kubectl:
        """The same in another namespace."""
        return replace(self, namespace=namespace)

    def _command(self) -> list[str]:
        options = {
            "--namespace": self.namespace,
            "--context": self.context,
            "--kubeconfig": self.kubeconfig,
        }
        return ["kubectl", *(f"{name}={value}" for name, value in options.items() if value)]


def _refusal(words: str) -> CommandError:
    if words.startswith("error: ") and any(part in words for part in _MISCONFIGURED):
        return UsageError(words, "check --kubeconfig and --context")
    if "NotFound" in words or "not found" in words:
        return NotFound(words)
    if "doesn't have a resource type" in words:
        return NotFound(words, "is the backstay chart installed in this cluster?")
    if "refused" in words or "Unable to connect" in words or "i/o timeout" in words:
        return NoAnswer(words)
    return CommandError(words)


def _address(process: subprocess.Popen[bytes], pod: str) -> str:
    """What kubectl says it forwards from. Raises NoAnswer."""
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = SYSTEM_CLOCK.monotonic() + _FORWARD_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - SYSTEM_CLOCK.monotonic()) > 0 and selector.select(left):
            line = process.stdout.readline()
            if match := _FORWARDING.match(line):
                return match[1].decode()
            if not line:  # it has ended
                words = process.stderr.read().decode(errors="replace").strip()
                raise NoAnswer(f"pod {pod}: its port can't be forwarded: {words}")
    raise NoAnswer(f"pod {pod}: its port was not forwarded within {_FORWARD_SECONDS:.0f} s")


class ClusterJob:
    """One TrainingJob. Use it as a context: port-forwards end with it."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        """`name`: empty where the namespace has only one. Raises NotFound or UsageError."""
        self.kubectl = kubectl
        self.tree = kubectl.get(_JOBS, name) if name else _only(kubectl.get(_JOBS))
        self.name: str = self.tree["metadata"]["name"]
        self.namespace: str = self.tree["metadata"]["namespace"]
        self._forwards = ExitStack()
        self._known: dict[int, str] = {}
        self.pods = current_pods(  # of those that run: replica -> name
            kubectl.get("pods", f"--selector={LABEL_JOB}={self.name}").get("items", [])
        )

    def __enter__(self) -> ClusterJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._forwards.close()

    @property
    def status(self) -> dict[str, Any]:
        """As the operator wrote it; empty: nothing yet."""
        found: dict[str, Any] = self.tree.get("status") or {}
        return found

    @property
    def runs(self) -> bool:
        """Whether the pod of replica 0, whose sidecar leads, runs."""
        return 0 in self.pods

    def address(self, replica: int = 0) -> str:
        """Of the replica's sidecar, forwarded. Raises NoAnswer."""
        if replica not in self._known:
            if replica not in self.pods:
                raise NoAnswer(f"{self.namespace}/{self.name}: replica {replica} has no pod")
            forward = self.kubectl.forward(self.pods[replica], PORT_API)
            self._known[replica] = self._forwards.enter_context(forward)
        return self._known[replica]

    def forward_all(self) -> None:
        """Forward to every pod that runs, many at a time; one that can't be reached is left out.

        Before a checkpoint is chosen: a job that trains fast overwrites it while kubectl starts.
        """
        missing = [replica for replica in self.pods if replica not in self._known]
        opened = [self.kubectl.forward(self.pods[replica], PORT_API) for replica in missing]
        with ThreadPoolExecutor(_FORWARDS_AT_ONCE) as threads:
            addresses = list(threads.map(_entered, opened))
        for replica, forward, address in zip(missing, opened, addresses, strict=True):
            if address:
                self._forwards.push(forward)
                self._known[replica] = address

    def reach(self, view: ReplicaView) -> str:
        """URL of a replica's sidecar; empty: it can't be reached from here just now."""
        with contextlib.suppress(NoAnswer):
            return f"http://{self.address(view.replica)}"
        return ""

    def token(self) -> str:
        """The job's. Raises CommandError where the person may not read it."""
        return self.kubectl.secret(owned_name(self.name)).get(TOKEN_KEY, "")

    @property
    def run_name(self) -> str:
        """What its checkpoints are kept under, with the namespace."""
        return str(self.tree["spec"]["checkpoint"].get("runName") or self.name)


def _entered(forward: AbstractContextManager[str]) -> str:
    try:
        return forward.__enter__()
    except NoAnswer:
        return ""


def current_pods(pods: list[Mapping[str, Any]]) -> dict[int, str]:
    """Replica -> name of its newest pod, of those that run."""
    found: dict[int, tuple[int, str]] = {}
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        running = (pod.get("status") or {}).get("phase") == "Running"
        if not running or pod["metadata"].get("deletionTimestamp"):
            continue
        replica, generation = int(labels[LABEL_REPLICA]), int(labels[LABEL_GENERATION])
        found[replica] = max(found.get(replica, (0, "")), (generation, pod["metadata"]["name"]))
    return {replica: name for replica, (_, name) in sorted(found.items())}


def _only(found: Mapping[str, Any]) -> dict[str, Any]:
    items: list[dict[str, Any]] = found.get("items", [])
    if len(items) == 1:
        return items[0]
    if not items:
        raise NotFound("there is no TrainingJob in this namespace", "name another one with -n")
    names = ", ".join(item["metadata"]["name"] for item in items[:_SHOWN])
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    raise UsageError(f"several TrainingJobs: {names}{more}", "name one with --job")


def _decoded(secret: str, key: str, value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise CommandError(f"Secret {secret}: {key} is not text") from error
