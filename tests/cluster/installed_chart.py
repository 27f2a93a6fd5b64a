"""charts/backstay installed by helm into the cluster under test, with the images built for it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cluster.built_images import ROOT, Image
from cluster.kube import Kube, Object, is_true
from cluster.machine import TORCH_FOLDER, program

NAMESPACE = "backstay-system"
RELEASE = "backstay"
DEPLOYMENT = "backstay-operator"
CHART = ROOT / "charts" / "backstay"
WAIT_SECONDS = 120

Values = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """The release, and what it was installed with."""

    kube: Kube
    values: Values
    namespace: str = NAMESPACE
    release: str = RELEASE

    def upgrade(self, **changed: Any) -> str:
        """Install or upgrade with some top-level values changed or added; waits until it is up."""
        values = merged(self.values, changed)
        return self.helm(
            "upgrade", "--install", self.release, str(CHART), "--create-namespace",
            "--wait", f"--timeout={WAIT_SECONDS}s", "--values=-",
            stdin=json.dumps(values),
        )  # fmt: skip

    def helm(self, *argv: str, stdin: str | None = None) -> str:
        """What helm prints; AssertionError with the namespace's dump if it fails."""
        command = [program("helm"), f"--kubeconfig={self.kube.kubeconfig}", "-n", self.namespace]
        done = subprocess.run(
            [*command, *argv],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS + 60,
        )
        if done.returncode != 0:
            dump = self.kube.dump(self.namespace)
            raise AssertionError(f"helm {' '.join(argv)}: {done.stderr.strip()}\n{dump}")
        return done.stdout

    # --- the operator's pod -----------------------------------------------------------------

    def operators(self) -> list[Object]:
        """Pods of the operator that have not been told to end."""
        pods = self.kube.list("pods", self.namespace, "app.kubernetes.io/component=operator")
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]

    def node(self) -> str:
        """Where the operator runs."""
        return str(self.operators()[0]["spec"]["nodeName"])

    def kill(self) -> None:
        """SIGKILL, without a word to its Lease; the Deployment makes another one."""
        for pod in self.operators():
            name = pod["metadata"]["name"]
            self.kube.delete("pod", name, self.namespace, "--grace-period=0", "--force")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """No operator within the block; one that works again after it."""
        self._scale(0)
        try:
            self.kube.wait("no operator", lambda: not self._pods(), namespace=self.namespace)
            yield
        finally:
            self._scale(1)
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until the operator is up; that it leads takes a moment more."""
        self.kube.wait(
            "an operator Ready",
            lambda: any(is_true(pod, "Ready") for pod in self.operators()),
            timeout=WAIT_SECONDS,
            namespace=self.namespace,
        )

    def _scale(self, replicas: int) -> None:
        self.kube.run(
            "scale", "deployment", DEPLOYMENT, "-n", self.namespace, f"--replicas={replicas}"
        )

    def _pods(self) -> list[Object]:
        return self.kube.list("pods", self.namespace, "app.kubernetes.io/component=operator")


@contextmanager
def installed(kube: Kube, operator: Image, sidecar: Image) -> Iterator[Chart]:
    """Install; uninstall at the end."""
    chart = Chart(kube, values_for(operator, sidecar))
    chart.upgrade()
    try:
        yield chart
    finally:
        chart.helm("uninstall", RELEASE, "--wait", "--ignore-not-found")


def values_for(operator: Image, sidecar: Image) -> Values:
    """Our images, torch from the nodes, and losses noticed as fast as this cluster does."""
    return {
        "operator": {"image": _image(operator)},
        "sidecar": {"image": _image(sidecar)},
        "policy": {"allow": {"hostPaths": [TORCH_FOLDER]}},
    }


def _image(image: Image) -> Values:
    return {
        "registry": image.registry,
        "repository": image.name,
        "tag": image.tag,
        "pullPolicy": "IfNotPresent",
    }


def merged(base: Values, changed: Values) -> Values:
    """`base` with the values of `changed`, maps within maps merged as helm does."""
    result = dict(base)
    for key, value in changed.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value
    return result
