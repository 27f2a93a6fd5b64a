"""The S3 server of the cluster tests: SeaweedFS in a pod, Service `s3` in backstay-store."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from minio import Minio

from cluster.kube import Kube, Object
from cluster.machine import Cluster
from support.s3 import ACCESS_KEY, REGION, SECRET_KEY, S3Server

NAMESPACE = "backstay-store"
NAME = "s3"
PORT = 8333
BUCKET = "checkpoints"
CONTROL_PLANE = "node-role.kubernetes.io/control-plane"


@dataclass(frozen=True)
class Store:
    """A running server with one bucket."""

    kube: Kube
    namespace: str = NAMESPACE
    bucket: str = BUCKET
    region: str = REGION
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    @property
    def endpoint(self) -> str:
        """Where pods reach it."""
        return f"http://{NAME}.{self.namespace}:{PORT}"

    def secret(self, name: str) -> Object:
        """The credentials as a Secret that a job can name."""
        values = {"accessKey": self.access_key, "secretKey": self.secret_key}
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}

    @contextmanager
    def client(self) -> Iterator[Minio]:
        """A stock client on this machine, through a port-forward that lasts for the block."""
        with self.kube.port_forward(self.namespace, f"pod/{NAME}", PORT) as port:
            yield S3Server(f"http://127.0.0.1:{port}", pid=0).client()

    @contextmanager
    def paused(self, cluster: Cluster) -> Iterator[None]:
        """Within the block the server takes connections and answers nothing: it hangs."""
        pod = self.kube.get("pod", NAME, self.namespace)
        assert pod is not None
        node = pod["spec"]["nodeName"]
        number = 0 if node == "control" else int(node.removeprefix("node-"))
        try:
            cluster.node_exec(number, "pkill", "-STOP", "-x", "weed")
            yield
        finally:
            cluster.node_exec(number, "pkill", "-CONT", "-x", "weed")

    def make_bucket(self, name: str) -> str:
        """A further bucket."""
        self.kube.exec(
            self.namespace, NAME, "sh", "-c",
            f"echo 's3.bucket.create -name {name}' | weed shell -master=localhost:9333",
        )  # fmt: skip
        return name

    def names(self, prefix: str = "") -> list[str]:
        """Every object of the bucket below a prefix."""
        with self.client() as client:
            found = client.list_objects(bucket_name=self.bucket, prefix=prefix, recursive=True)
            return sorted(item.object_name or "" for item in found)


@contextmanager
def running(kube: Kube, image: str) -> Iterator[Store]:
    """Start the server and make its bucket; the namespace goes at the end."""
    with kube.namespace(NAMESPACE):
        kube.apply(_service(), _pod(image), namespace=NAMESPACE)
        kube.wait_ready(NAMESPACE, NAME, timeout=90)
        store = Store(kube)
        kube.wait("a bucket", lambda: _usable(store), timeout=60, namespace=NAMESPACE)
        yield store


def _usable(store: Store) -> bool:
    store.make_bucket(store.bucket)
    listing = store.kube.exec(
        store.namespace, NAME, "sh", "-c",
        "echo s3.bucket.list | weed shell -master=localhost:9333",
    )  # fmt: skip
    return store.bucket in listing


def _service() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"selector": {"app": NAME}, "ports": [{"port": PORT}]},
    }


def _pod(image: str) -> Object:
    container = {
        "name": "weed",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": NAME, "labels": {"app": NAME}},
        "spec": {
            # Beside the nodes that tests break, where there is such a place.
            "affinity": {"nodeAffinity": _on_control_plane()},
            "tolerations": [{"key": CONTROL_PLANE, "operator": "Exists"}],
            "containers": [container],
            "volumes": [{"name": "data", "emptyDir": {}}],
            "terminationGracePeriodSeconds": 2,
            "automountServiceAccountToken": False,
        },
    }


def _on_control_plane() -> Object:
    preference = {"matchExpressions": [{"key": CONTROL_PLANE, "operator": "Exists"}]}
    preferred = [{"weight": 100, "preference": preference}]
    return {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
