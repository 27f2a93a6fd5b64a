"""The definition of TrainingJob on a real API server: what it refuses, fills in, keeps and drops.

The API server and its etcd run alone on loopback, with no cluster around them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from backstay_operator.api import read_allowances, read_job
from cluster import machine
from cluster.harness import layout
from support import bad_jobs
from support.api_server import Answer, ApiServer, running
from support.bad_jobs import BAD, GONE, LOCAL, MEMORY, NEIGHBOR, REMOTE, VALID, Bad, job
from support.rendered_chart import crd

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
JOBS = "/apis/backstay.dev/v1alpha1/namespaces/default/trainingjobs"
STRICT = read_allowances({})


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not (layout.bin_dir() / "kube-apiserver").exists():
        machine.build_programs()
    with running(layout.bin_dir(), tmp_path_factory.mktemp("api-server")) as it:
        it.must("POST", DEFINITIONS, crd())
        it.until(lambda: it.call("GET", JOBS).code == 200, "the API server serves TrainingJobs")
        yield it


def dry(api: ApiServer, tree: dict[str, Any]) -> Answer:
    return api.call("POST", JOBS, tree, dryRun="All", fieldValidation="Strict")


@pytest.mark.parametrize("bad", BAD, ids=[bad.id for bad in BAD])
def test_a_wrong_manifest_is_refused_with_words_that_say_what_to_change(
    api: ApiServer, bad: Bad
) -> None:
    answer = dry(api, job(bad.changes))
    assert answer.code in (400, 422), answer.tree
    assert bad.words in answer.tree["message"]


@pytest.mark.parametrize("changes", VALID.values(), ids=VALID)
def test_what_the_api_server_fills_in_reads_as_what_was_written(
    api: ApiServer, changes: Mapping[str, Any]
) -> None:
    written = job(changes)
    answer = dry(api, written)
    assert answer.code == 201, answer.tree["message"]
    assert read_job(answer.tree, STRICT) == read_job(written, STRICT)


def test_any_field_of_a_pod_is_kept_as_it_is(api: ApiServer) -> None:
    tree = job()
    pod = tree["spec"]["podTemplate"]["spec"]
    pod["containers"][0] |= {
        "env": [{"name": "SEED", "value": "1"}],
        "resources": {"limits": {"memory": "8Gi", "nvidia.com/gpu": 8}},
        "aFieldOfTomorrow": {"x": [1, 2]},
    }
    pod |= {"schedulerName": "other", "nodeSelector": {"a": "b"}, "aFieldOfTomorrow": True}
    assert dry(api, tree).tree["spec"]["podTemplate"] == tree["spec"]["podTemplate"]


# (id, what changes after the job was made, words of the refusal; none: it is taken)
CHANGES = [
    ("replicas", {}, {"spec.replicas": 3}, "delete the job and apply it again with the new number"),
    ("processes", {}, {"spec.processesPerReplica": 2}, "delete the job and apply it again"),
    ("launcher", {}, {"spec.launcher": "static"}, "delete the job and apply it again"),
    ("queue", {}, {"spec.queueName": "q"}, "delete the job and apply it again"),
    ("run", {}, {"spec.checkpoint.runName": "b"}, "another run is another job"),
    (
        "run",
        {"spec.checkpoint.runName": "a"},
        {"spec.checkpoint.runName": "b"},
        "another run is another job",
    ),
    ("endpoint", {}, {f"{REMOTE}.endpoint": "https://b.example.org"}, "copy the run's folder"),
    ("bucket", {}, {f"{REMOTE}.bucket": "other"}, "copy the run's folder"),
    ("prefix", {}, {f"{REMOTE}.prefix": "b"}, "copy the run's folder"),
    ("no remote tier", {}, {REMOTE: GONE}, "can't be added or removed"),
    ("no neighbor", {}, {NEIGHBOR: GONE}, "can't be added or removed"),
    ("new disks", {LOCAL: GONE, NEIGHBOR: GONE}, {LOCAL: {}}, "can't be added or removed"),
    ("volume", {}, {LOCAL: {"volume": "pvc", "size": "1Gi"}}, "local.volume can't change"),
    ("path", {}, {f"{LOCAL}.path": "/var/lib/backstay/b"}, "would be lost"),
    ("suspend", {}, {"spec.suspend": True}, ""),
    ("schedules", {}, {f"{MEMORY}.everySteps": 5, f"{LOCAL}.everySteps": 20}, ""),
    ("retention", {}, {f"{LOCAL}.keepLast": 5, f"{REMOTE}.keepEvery": 1000}, ""),
    ("template", {}, {f"{bad_jobs.POD}.containers.0.image": "gpt:2"}, ""),
    ("size", {}, {f"{MEMORY}.sizeLimit": "2Gi", f"{MEMORY}.slots": 3}, ""),
    ("topology key", {}, {f"{NEIGHBOR}.topologyKey": "rack"}, ""),
    ("credentials", {}, {f"{REMOTE}.credentialsSecret": "new"}, ""),
    ("times", {}, {"spec.drainHoldSeconds": 1, "spec.ttlSecondsAfterFinished": 5}, ""),
    ("a choice", {}, {"spec.restore": {"step": 10}}, ""),
]


@pytest.mark.parametrize("case", CHANGES, ids=[f"{case[0]} {i}" for i, case in enumerate(CHANGES)])
def test_a_job_that_exists_changes_or_says_what_to_do_instead(
    api: ApiServer, case: tuple[Any, ...]
) -> None:
    _, before, after, words = case
    made = api.must("POST", JOBS, job(before))
    try:
        changed = job({**before, **after})
        changed["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
        answer = api.call("PUT", f"{JOBS}/gpt", changed)
        assert answer.code == (422 if words else 200), answer.tree
        assert words in answer.tree.get("message", "")
    finally:
        api.must("DELETE", f"{JOBS}/gpt")


STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Running",
            "status": "True",
            "observedGeneration": 1,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
            "reason": "AllReplicasTraining",
            "message": "all replicas train",
        }
    ],
    "run": "default/gpt",
    "replicas": 2,
    "ready": "2/2",
    "step": 120,
    "durableStep": 100,
    "durableTime": "2026-01-01T00:00:00Z",
    "restarts": 1,
    "reason": "AllReplicasTraining",
    "attempt": 1_700_000_000_000_001,
    "attemptName": "1.1",
    "generations": {"first": 1, "pods": {"0": {"generation": 1, "replaces": 0, "created": True}}},
    "tiers": {
        name: {"step": 100, "ageSeconds": 1.5, "ok": True, "message": ""}
        for name in ("memory", "local", "neighbor", "remote")
    },
    "lagging": [{"rank": 3, "replica": 1, "step": 119, "ageSeconds": 0.2}],
    "lastRestore": {
        "attempt": 1_700_000_000_000_001,
        "attemptName": "1.1",
        "step": 100,
        "tiers": {"memory": 1 << 40},
        "detectSeconds": 0.5,
        "scheduleSeconds": 3,
        "restoreSeconds": 1.25,
        "time": "2026-01-01T00:00:00Z",
    },
    "recoveries": [
        {
            "time": "2026-01-01T00:00:00Z",
            "reason": "NodeLost",
            "message": "node-1 is gone",
            "replicas": [0],
            "tier": "neighbor",
            "detectSeconds": 0.5,
            "scheduleSeconds": 3,
            "restoreSeconds": 1.25,
        }
    ],
}


def test_a_whole_status_is_kept_and_the_columns_show_it(api: ApiServer) -> None:
    made = api.must("POST", JOBS, job())
    try:
        body = {**made, "status": STATUS}
        kept = api.must("PUT", f"{JOBS}/gpt/status", copy.deepcopy(body))
        assert kept["status"] == STATUS
        table = api.must(
            "GET", f"{JOBS}/gpt", accept="application/json;as=Table;v=v1;g=meta.k8s.io"
        )
        names = [column["name"] for column in table["columnDefinitions"]]
        cells = dict(zip(names, table["rows"][0]["cells"], strict=True))
        cells.pop("Age")
        assert cells == {
            "Name": "gpt",
            "Ready": "2/2",
            "Step": 120,
            "Durable": 100,
            "Restarts": 1,
            "Reason": "AllReplicasTraining",
            "Replicas": 2,
            "Attempt": "1.1",
            "Run": "default/gpt",
        }
    finally:
        api.must("DELETE", f"{JOBS}/gpt")


def test_a_spec_never_changes_by_its_status_and_a_status_never_by_its_spec(api: ApiServer) -> None:
    made = api.must("POST", JOBS, {**job(), "status": STATUS})
    try:
        assert "status" not in made
        body = {**made, "status": {"step": 1}, "spec": job({"spec.suspend": True})["spec"]}
        kept = api.must("PUT", f"{JOBS}/gpt/status", body)
        assert kept["spec"] == made["spec"]
    finally:
        api.must("DELETE", f"{JOBS}/gpt")
