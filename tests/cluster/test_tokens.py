"""A job's API answers its own token, on ports that only its own pods and the operator reach.

What answers without a token tells nothing else.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from cluster.built_images import Image
from cluster.installed_chart import Chart
from cluster.kube import Kube, Object
from cluster.training import PORT_API, PORT_HEALTH, Job, ask

ROUTES = ("/v1/job", "/v1/status", "/v1/checkpoints", "/v1/events", "/openapi.json", "/nowhere")
OPEN = ("/healthz", "/readyz", "/metrics")


def test_the_api_refuses_whoever_has_no_token_or_another_jobs(
    long_job: Job, make_job: Callable[..., Job]
) -> None:
    other = make_job("other", suspend=True)
    other.apply()
    try:
        foreign = other.wait("a token of its own", other.token, 60)
    finally:
        other.delete()
    with long_job.port(0, PORT_API) as base:
        for token in ("", foreign, f"{long_job.token()}x"):
            codes = {path: ask(base + path, token)[0] for path in ROUTES}
            assert codes == dict.fromkeys(ROUTES, 401)
            assert ask(f"{base}/v1/flush", token, method="POST")[0] == 401
        assert ask(f"{base}/v1/job", long_job.token())[0] == 200


def test_the_health_port_tells_health_and_metrics_and_nothing_else(long_job: Job) -> None:
    token = long_job.token()
    with long_job.port(1, PORT_HEALTH) as base:
        answers = {path: ask(base + path) for path in OPEN}
        assert {path: code for path, (code, _) in answers.items()} == dict.fromkeys(OPEN, 200)
        assert "backstay_step" in answers["/metrics"][1]
        assert all(token not in body for _, body in answers.values())
        codes = {path: ask(base + path, token)[0] for path in ROUTES}
        assert codes == dict.fromkeys(ROUTES, 404)


PORT_RENDEZVOUS = 29400
TRY = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 5).close()
        print(port, "open")
    except OSError:
        print(port, "closed")
"""
PORTS = (PORT_API, PORT_HEALTH, PORT_RENDEZVOUS)


def test_only_the_jobs_own_pods_and_the_operator_reach_its_ports(
    long_job: Job, chart: Chart, kube: Kube, images: dict[str, Image]
) -> None:
    address = long_job.pod(0)["status"]["podIP"]
    outsider = _outsider(images["backstay-example-trainer"].reference)
    kube.apply(outsider, namespace=long_job.namespace)
    try:
        kube.wait_ready(long_job.namespace, "outsider", timeout=90)
        assert _reached(kube, long_job.namespace, "outsider", "", address) == {PORT_HEALTH}
    finally:
        kube.delete("pod", "outsider", long_job.namespace, "--grace-period=0", "--force")
    member = _reached(kube, long_job.namespace, long_job.pod_name(1), "trainer", address)
    assert member == set(PORTS)
    operator = chart.operators()[0]["metadata"]["name"]
    assert _reached(kube, chart.namespace, operator, "", address) == {PORT_API, PORT_HEALTH}


def test_curl_takes_a_shard_that_stock_safetensors_reads(long_job: Job, tmp_path: Path) -> None:
    out = tmp_path / "0.safetensors"
    with long_job.port(0, PORT_API) as base:
        url = f"{base}/v1/checkpoints/latest/shards/0"
        header = f"Authorization: Bearer {long_job.token()}"
        # What lies in memory may be overwritten meanwhile: then it answers so, and is asked again.
        again = ("--retry", "5", "--retry-all-errors")
        done = subprocess.run(
            ["curl", "-sSf", *again, "-H", header, "-o", str(out), url],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert load_file(out)


def _outsider(image: str) -> Object:
    """A pod in the job's namespace that is none of its own."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "outsider"},
        "spec": {
            "containers": [
                {
                    "name": "idle",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sleep", "600"],
                }
            ],
            "automountServiceAccountToken": False,
        },
    }


def _reached(kube: Kube, namespace: str, pod: str, container: str, address: str) -> set[int]:
    """Ports of an address that take a connection from within a pod."""
    ports = [str(port) for port in PORTS]
    told = kube.exec(
        namespace, pod, "python3", "-c", TRY, address, *ports, container=container
    ).split()
    return {int(port) for port, state in zip(told[::2], told[1::2], strict=True) if state == "open"}
