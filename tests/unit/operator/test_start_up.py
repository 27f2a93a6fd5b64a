"""What the operator is told, what it tells: settings, logs, health, metrics."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from backstay_operator.cluster import LEASE, NODE, POD
from backstay_operator.config import read_config
from backstay_operator.errors import AlreadyThere, ConfigError, Conflict, Refused, Unreachable
from backstay_operator.health import HttpThread, health_routes, metrics_routes
from backstay_operator.kube import TokenBucket, _as_ours, _path
from backstay_operator.main import _check_crd, _left_alone, _prepare
from backstay_operator.metrics import Metrics
from support.fake_api import FakeClock, FakeCluster

FILE: dict[str, Any] = {
    "clusterName": "prod",
    "namespaces": ["a"],
    "sidecar": {"image": "sidecar:1", "cpu": "1", "memory": "1Gi", "graceSeconds": 60,
                "pullPolicy": "IfNotPresent"},
    "allow": {"serviceAccounts": ["default"], "hostPaths": ["/opt/torch"]},
    "drainTaints": ["x"],
    "nodeLostSeconds": 30,
    "leaderElection": {"enabled": False, "leaseName": "l", "namespace": "n"},
    "ports": {"metrics": 1, "health": 2},
    "log": {"level": "debug", "format": "text"},
}  # fmt: skip


def test_the_settings_file_is_read_whole() -> None:
    config = read_config(FILE)
    assert config.cluster_name == "prod"
    assert config.namespaces == ("a",)
    assert config.sidecar.grace_seconds == 60
    assert config.allow.host_paths == ("/opt/torch",)
    assert config.cluster.drain_taints == ("x",)
    assert config.cluster.node_lost_seconds == 30
    assert not config.lease.enabled
    assert (config.metrics_port, config.health_port) == (1, 2)
    assert not config.log_json
    assert config.sidecar.log_format == "text"


def test_everything_but_the_sidecars_image_has_a_default() -> None:
    config = read_config({"sidecar": {"image": "s"}})
    assert config.lease.enabled
    assert config.cluster.node_lost_seconds == 60
    assert config.allow.service_accounts == ("default",)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"sidecar": {}}, "sidecar.image is missing"),
        ({"colour": "red"}, "unknown key colour"),
        ({"log": {"colour": "red"}}, "unknown key log.colour"),
        ({"log": {"format": "xml"}}, "log.format is 'xml'; expected json or text"),
        ({"nodeLostSeconds": "soon"}, "nodeLostSeconds is 'soon'; expected a number"),
        ({"nodeLostSeconds": -1}, "expected a number"),
        ({"namespaces": "a"}, "expected a list"),
        ({"leaderElection": {"enabled": "yes"}}, "expected true or false"),
        ({"ports": [1]}, "not a mapping"),
        ({"clusterName": []}, "expected text"),
        ({"allow": {"colour": 1}}, "allow.colour"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=r"operator\.yaml") as error:
        read_config({**FILE, **change})
    assert word in str(error.value)


SPEAK = """
import logging, sys, threading, warnings
from backstay_operator.logs import about_job, configure

configure("info", as_json=sys.argv[1] == "json")
logging.getLogger("backstay.main").info("starts")
with about_job("team", "gpt"):
    logging.getLogger("backstay.work").warning("again", extra={"replica": 3})
    logging.getLogger("kopf.objects").warning("a handler failed")
    logging.getLogger("kopf.objects").info("not worth a line")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("boom")
"""


def spoken(form: str) -> list[str]:
    """What a process says to stdout and stderr that logs as the operator does."""
    command = [sys.executable, "-c", SPEAK, form]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 1
    return done.stdout.splitlines()


def test_every_line_is_one_object_with_the_job_that_it_is_about() -> None:
    first, again, kopf, warning, thread, last = map(json.loads, spoken("json"))
    assert (first["message"], first["level"], "job" in first) == ("starts", "info", False)
    assert (again["namespace"], again["job"], again["replica"]) == ("team", "gpt", 3)
    assert (kopf["logger"], kopf["job"]) == ("kopf.objects", "gpt")
    assert "UserWarning: old" in warning["message"]
    assert "ZeroDivisionError" in thread["exception"]
    assert "ValueError: boom" in last["exception"]
    assert all(line["time"].endswith("Z") for line in (first, last))


def test_people_read_the_job_before_the_message() -> None:
    assert any("backstay.work: team/gpt: again" in line for line in spoken("text"))


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_says_why_it_is_not() -> None:
    why = [""]
    server = HttpThread(0, health_routes(lambda: why[0]), "127.0.0.1")
    server.start()
    try:
        assert get(server.port, "/healthz") == (200, "ok\n")
        why[0] = "no worker has turned"
        assert get(server.port, "/healthz") == (500, "no worker has turned\n")
        assert get(server.port, "/other")[0] == 404
    finally:
        server.stop()


def test_jobs_are_counted_by_condition_and_go_to_zero() -> None:
    metrics = Metrics()
    metrics.note_jobs([["Running", "Durable"], ["Running"]])
    metrics.note_jobs([["Durable"]])
    server = HttpThread(0, metrics_routes(metrics.registry), "127.0.0.1")
    server.start()
    try:
        text = get(server.port, "/metrics")[1]
    finally:
        server.stop()
    assert 'backstay_operator_jobs{condition="Running"} 0.0' in text
    assert 'backstay_operator_jobs{condition="Durable"} 1.0' in text
    assert "backstay_operator_queue_depth 0.0" in text


# --- the cluster it starts in --------------------------------------------------------------------


def crd(schema: str | None) -> dict[str, Any]:
    annotations = {} if schema is None else {"backstay.dev/schema": schema}
    return {"metadata": {"name": "trainingjobs.backstay.dev", "annotations": annotations}}


@pytest.mark.parametrize(
    ("found", "word"),
    [(None, "there is no CRD"), (crd(None), "has schema 0"), (crd("0"), "helm upgrade")],
)
async def test_an_older_definition_is_refused(found: dict[str, Any] | None, word: str) -> None:
    cluster = FakeCluster(FakeClock())
    if found is not None:
        key = ("CustomResourceDefinition", "", found["metadata"]["name"])
        cluster.objects[key] = found
    with pytest.raises(ConfigError, match=word):
        await _check_crd(cluster)


async def test_a_cluster_without_a_name_is_called_by_its_uid() -> None:
    cluster = FakeCluster(FakeClock())
    definition = crd("1")
    cluster.objects["CustomResourceDefinition", "", definition["metadata"]["name"]] = definition
    config = read_config({"sidecar": {"image": "s"}})
    with pytest.raises(ConfigError, match="clusterName must be set"):
        await _prepare(cluster, config)
    cluster.objects["Namespace", "", "kube-system"] = {"metadata": {"uid": "u-7"}}
    assert await _prepare(cluster, config) == "u-7"
    assert await _prepare(cluster, read_config(FILE)) == "prod"

    def forbid(call: str) -> None:
        raise Refused(call)

    cluster.before = forbid
    with pytest.raises(ConfigError, match="clusterName must be set"):
        await _prepare(cluster, config)


async def test_jobs_outside_of_the_namespaces_are_named_where_they_can_be_seen() -> None:
    cluster = FakeCluster(FakeClock())
    for namespace in ("a", "b"):
        cluster.add_job({"metadata": {"name": "gpt", "namespace": namespace}})
    assert (await _left_alone(cluster, ["a"])).endswith("left alone: b/gpt")
    assert (await _left_alone(cluster, ["a", "b"])).endswith("left alone: there are none")

    def forbid(call: str) -> None:
        raise Refused(call)

    cluster.before = forbid
    assert (await _left_alone(cluster, ["a"])).endswith("whether there are any it may not see")


# --- the client ----------------------------------------------------------------------------------


def answer(status: int, reason: str = "") -> ApiException:
    error = ApiException(status=status, reason="Words")
    error.body = json.dumps({"reason": reason, "message": f"the server says {reason}"})
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(409, "AlreadyExists"), AlreadyThere),
        (answer(409, "Conflict"), Conflict),
        (answer(403, "Forbidden"), Refused),
        (answer(422, "Invalid"), Refused),
        (answer(404, "NotFound"), Refused),
        (answer(503, "ServiceUnavailable"), Unreachable),
    ],
)
def test_answers_become_the_operators_own_errors(error: ApiException, kind: type) -> None:
    ours = _as_ours(error, "create Pod a/b")
    assert isinstance(ours, kind)
    assert str(ours).startswith("create Pod a/b: the server says")


def test_an_answer_without_a_body_still_says_something() -> None:
    error = ApiException(status=502, reason="Bad Gateway")
    assert "Bad Gateway" in str(_as_ours(error, "x"))


def test_paths_of_kinds() -> None:
    assert _path(POD, "team", "a") == "/api/v1/namespaces/team/pods/a"
    assert _path(POD, "") == "/api/v1/pods"
    assert _path(NODE, "") == "/api/v1/nodes"
    path = _path(LEASE, "n", "l")
    assert path == "/apis/coordination.k8s.io/v1/namespaces/n/leases/l"


async def test_calls_over_the_burst_wait_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.pass_time(seconds)

    monkeypatch.setattr("asyncio.sleep", sleep)
    bucket = TokenBucket(clock, rate=10, burst=3)
    for _ in range(5):
        await bucket.take()
    assert waits == pytest.approx([0.1, 0.1])
