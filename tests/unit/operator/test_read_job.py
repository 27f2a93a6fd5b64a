"""Every mistake in a manifest is one line that names the field and says what to change."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from backstay_operator.api import InvalidJob, read_job

BASE: dict[str, Any] = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt"},
    "spec": {
        "replicas": 2,
        "podTemplate": {
            "spec": {"containers": [{"name": "trainer", "command": ["torchrun", "train.py"]}]}
        },
        "checkpoint": {
            "memory": {"everySteps": 10, "sizeLimit": "1Gi"},
            "local": {},
            "neighbor": {},
            "remote": {"endpoint": "https://s3.example.org", "bucket": "models"},
        },
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    node: Any = tree
    for name in parents:
        node = node[int(name)] if name.isdigit() else node.setdefault(name, {})
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return tree


def problems(tree: Any) -> list[str]:
    with pytest.raises(InvalidJob) as caught:
        read_job(tree)
    return [str(problem) for problem in caught.value.problems]


CONTAINER = "spec.podTemplate.spec.containers.0"
SHOWN = "spec.podTemplate.spec.containers[0]"
CHECKPOINT = "spec.checkpoint"

# (id, field to change, value, path that the line names, words that it must hold)
CASES = [
    ("api version", "apiVersion", "v1", "apiVersion", ["backstay.dev/v1alpha1"]),
    ("kind", "kind", "Job", "kind", ["write `kind: TrainingJob`"]),
    ("no name", "metadata.name", ..., "metadata.name", ["missing", "write `name:"]),
    ("capital name", "metadata.name", "GPT", "metadata.name", ["'GPT'", "lower-case"]),
    ("long name", "metadata.name", "a" * 51, "metadata.name", ["at most 50"]),
    ("name ends in dash", "metadata.name", "a-", "metadata.name", ["lower-case"]),
    ("name of another type", "metadata.name", 7, "metadata.name", ["got 7"]),
    ("unknown metadata", "metadata.lables", {}, "metadata.lables", ["did you mean labels?"]),
    ("no replicas", "spec.replicas", ..., "spec.replicas", ["missing", "write `replicas: 2`"]),
    ("replicas in words", "spec.replicas", "two", "spec.replicas", ["got 'two'", "whole number"]),
    ("replicas true", "spec.replicas", True, "spec.replicas", ["got True"]),
    ("zero replicas", "spec.replicas", 0, "spec.replicas", ["got 0", "from 1"]),
    ("half a replica", "spec.replicas", 1.5, "spec.replicas", ["got 1.5"]),
    ("launcher", "spec.launcher", "torchrn", "spec.launcher", ["write `launcher: torchrun`"]),
    ("misspelt field", "spec.replica", 2, "spec.replica", ["did you mean replicas?"]),
    ("foreign field", "spec.zzz", 2, "spec.zzz", ["unknown field", "remove it; known:"]),
    ("hang", "spec.hangSeconds", -1, "spec.hangSeconds", ["0 or more"]),
    ("suspend", "spec.suspend", "no", "spec.suspend", ["true or false"]),
    ("no template", "spec.podTemplate", ..., "spec.podTemplate", ["missing", "containers"]),
    (
        "no containers",
        "spec.podTemplate.spec.containers",
        ...,
        "spec.podTemplate.spec.containers",
        ["missing", "trainer"],
    ),
    ("no trainer", f"{CONTAINER}.name", "main", SHOWN[:-3], ["got main", "named trainer"]),
    ("the sidecar's name", f"{CONTAINER}.name", "backstay-sidecar", f"{SHOWN}.name", ["choose"]),
    ("no command", f"{CONTAINER}.command", ..., f"{SHOWN}.command", ["missing", "torchrun"]),
    (
        "number in the command",
        f"{CONTAINER}.command",
        ["torchrun", 5],
        f"{SHOWN}.command",
        ["list of strings", "quote numbers"],
    ),
    (
        "a flag of ours",
        f"{CONTAINER}.command",
        ["torchrun", "--nnodes=2", "train.py"],
        f"{SHOWN}.command",
        ["--nnodes", "remove it"],
    ),
    (
        "a flag of ours with underscores",
        f"{CONTAINER}.command",
        ["torchrun", "--rdzv_backend", "static", "train.py"],
        f"{SHOWN}.command",
        ["--rdzv-backend", "remove it"],
    ),
    ("env of ours", f"{CONTAINER}.env", [{"name": "RANK"}], f"{SHOWN}.env[0]", ["RANK", "remove"]),
    (
        "env number",
        f"{CONTAINER}.env",
        [{"name": "X", "value": 1}],
        f"{SHOWN}.env[0].value",
        ['write `value: "1"`'],
    ),
    ("env mapping", f"{CONTAINER}.env", {"X": "1"}, f"{SHOWN}.env", ["list of name and value"]),
    (
        "bad cpu",
        f"{CONTAINER}.resources",
        {"limits": {"cpu": "two"}},
        f"{SHOWN}.resources.limits.cpu",
        ["'two'", "quantity"],
    ),
    (
        "privileged",
        f"{CONTAINER}.securityContext",
        {"privileged": True},
        f"{SHOWN}.securityContext.privileged",
        ["remove it"],
    ),
    (
        "host network",
        "spec.podTemplate.spec.hostNetwork",
        True,
        "spec.podTemplate.spec.hostNetwork",
        ["remove it"],
    ),
    (
        "host path",
        "spec.podTemplate.spec.volumes",
        [{"name": "x", "hostPath": {"path": "/"}}],
        "spec.podTemplate.spec.volumes[0].hostPath",
        ["persistentVolumeClaim"],
    ),
    (
        "restart policy",
        "spec.podTemplate.spec.restartPolicy",
        "Never",
        "spec.podTemplate.spec.restartPolicy",
        ["OnFailure"],
    ),
    (
        "service account",
        "spec.podTemplate.spec.serviceAccountName",
        "admin",
        "spec.podTemplate.spec.serviceAccountName",
        ["allow-list"],
    ),
    (
        "another sidecar",
        "spec.podTemplate.spec.initContainers",
        [{"name": "x", "restartPolicy": "Always"}],
        "spec.podTemplate.spec.initContainers[0]",
        ["exactly one"],
    ),
    ("no checkpoint", CHECKPOINT, ..., CHECKPOINT, ["missing", "memory"]),
    ("no memory", f"{CHECKPOINT}.memory", ..., f"{CHECKPOINT}.memory", ["missing", "sizeLimit"]),
    (
        "no schedule",
        f"{CHECKPOINT}.memory",
        {"sizeLimit": "1Gi"},
        f"{CHECKPOINT}.memory.everySteps",
        ["everySteps: 100", "everySeconds: 30"],
    ),
    (
        "two schedules",
        f"{CHECKPOINT}.memory.everySeconds",
        5,
        f"{CHECKPOINT}.memory.everySeconds",
        ["both", "remove one"],
    ),
    (
        "no size",
        f"{CHECKPOINT}.memory.sizeLimit",
        ...,
        f"{CHECKPOINT}.memory.sizeLimit",
        ["missing", "plus 10 %"],
    ),
    (
        "size in words",
        f"{CHECKPOINT}.memory.sizeLimit",
        "2 gigabytes",
        f"{CHECKPOINT}.memory.sizeLimit",
        ["512Mi"],
    ),
    ("slots", f"{CHECKPOINT}.memory.slots", 9, f"{CHECKPOINT}.memory.slots", ["from 1 to 8"]),
    (
        "not a multiple",
        f"{CHECKPOINT}.local.everySteps",
        25,
        f"{CHECKPOINT}.local.everySteps",
        ["multiple of memory.everySteps (10)", "write `everySteps: 20`"],
    ),
    ("keepLast", f"{CHECKPOINT}.local.keepLast", 0, f"{CHECKPOINT}.local.keepLast", ["got 0"]),
    (
        "volume",
        f"{CHECKPOINT}.local.volume",
        "hostpath",
        f"{CHECKPOINT}.local.volume",
        ["hostPath"],
    ),
    ("pvc size", f"{CHECKPOINT}.local.volume", "pvc", f"{CHECKPOINT}.local.size", ["100Gi"]),
    (
        "useless size",
        f"{CHECKPOINT}.local.size",
        "5Gi",
        f"{CHECKPOINT}.local.size",
        ["no meaning", "remove it"],
    ),
    ("neighbor alone", f"{CHECKPOINT}.local", ..., f"{CHECKPOINT}.neighbor", ["write `local: {}`"]),
    ("lonely neighbor", "spec.replicas", 1, f"{CHECKPOINT}.neighbor", ["2 or more replicas"]),
    (
        "no endpoint",
        f"{CHECKPOINT}.remote.endpoint",
        ...,
        f"{CHECKPOINT}.remote.endpoint",
        ["https"],
    ),
    (
        "ftp",
        f"{CHECKPOINT}.remote.endpoint",
        "ftp://host",
        f"{CHECKPOINT}.remote.endpoint",
        ["http(s)://host[:port]"],
    ),
    (
        "endpoint with a path",
        f"{CHECKPOINT}.remote.endpoint",
        "https://host/bucket",
        f"{CHECKPOINT}.remote.endpoint",
        ["without a path"],
    ),
    (
        "bad port",
        f"{CHECKPOINT}.remote.endpoint",
        "https://host:http",
        f"{CHECKPOINT}.remote.endpoint",
        ["http(s)://host[:port]"],
    ),
    (
        "contradiction",
        f"{CHECKPOINT}.remote.secure",
        False,
        f"{CHECKPOINT}.remote.secure",
        ["contradicts", "remove secure"],
    ),
    (
        "both stores",
        f"{CHECKPOINT}.remote.embedded",
        True,
        f"{CHECKPOINT}.remote.endpoint",
        ["remove one of the two"],
    ),
    ("no bucket", f"{CHECKPOINT}.remote.bucket", ..., f"{CHECKPOINT}.remote.bucket", ["missing"]),
    ("bucket", f"{CHECKPOINT}.remote.bucket", "My_B", f"{CHECKPOINT}.remote.bucket", ["3 to 63"]),
    ("prefix", f"{CHECKPOINT}.remote.prefix", "/a", f"{CHECKPOINT}.remote.prefix", ["leading"]),
    (
        "misspelt schedule",
        f"{CHECKPOINT}.remote.everyStep",
        5,
        f"{CHECKPOINT}.remote.everyStep",
        ["did you mean everySteps?"],
    ),
    ("barrier", "spec.restore.barrierSeconds", 0, "spec.restore.barrierSeconds", ["1 or more"]),
    ("attempt alone", "spec.restore.attempt", 3, "spec.restore.attempt", ["write `step: ...`"]),
    (
        "fresh and a step",
        "spec.restore",
        {"step": 3, "fresh": True},
        "spec.restore.fresh",
        ["remove one of the two"],
    ),
    (
        "fresh and another run",
        "spec.restore",
        {"from": {"namespace": "a", "runName": "b"}, "fresh": True},
        "spec.restore.fresh",
        ["remove one of the two"],
    ),
    (
        "a run without a name",
        "spec.restore",
        {"from": {"namespace": "a"}},
        "spec.restore.from.runName",
        ["missing", "write `runName: gpt`"],
    ),
    (
        "clean-up policy",
        "spec.cleanupPodPolicy",
        "running",
        "spec.cleanupPodPolicy",
        ["one of Running, All, None", "write `cleanupPodPolicy: Running`"],
    ),
    (
        "time to live",
        "spec.ttlSecondsAfterFinished",
        -1,
        "spec.ttlSecondsAfterFinished",
        ["got -1"],
    ),
    ("drain", "spec.drainHoldSeconds", 1.5, "spec.drainHoldSeconds", ["whole number", "86400"]),
    ("node lost", "spec.nodeLostSeconds", 10**6, "spec.nodeLostSeconds", ["from 0 to 86400"]),
    ("final save", "spec.finalSaveSeconds", "5m", "spec.finalSaveSeconds", ["whole number"]),
    (
        "early deaths",
        "spec.failurePolicy",
        {"earlyDeaths": 0},
        "spec.failurePolicy.earlyDeaths",
        ["from 1 to 1000"],
    ),
    ("queue", "spec.queueName", "My Queue", "spec.queueName", ["LocalQueue"]),
    ("endless", "spec.hangSeconds", float("inf"), "spec.hangSeconds", ["at most"]),
    (
        "topology key",
        f"{CHECKPOINT}.neighbor.topologyKey",
        "no spaces",
        f"{CHECKPOINT}.neighbor.topologyKey",
        ["node label"],
    ),
    ("copies", f"{CHECKPOINT}.neighbor.copies", 2, f"{CHECKPOINT}.neighbor.copies", ["1 to 1"]),
    (
        "a way out of the folder",
        f"{CHECKPOINT}.local.path",
        "/var/../etc",
        f"{CHECKPOINT}.local.path",
        ["absolute folder"],
    ),
    (
        "a prefix that climbs",
        f"{CHECKPOINT}.remote.prefix",
        "a/../b",
        f"{CHECKPOINT}.remote.prefix",
        ["leading"],
    ),
    (
        "an authority of a store that the run brings",
        f"{CHECKPOINT}.remote",
        {"embedded": True, "caSecret": "my-ca"},
        f"{CHECKPOINT}.remote.caSecret",
        ["no meaning with embedded"],
    ),
    (
        "keys and an identity",
        f"{CHECKPOINT}.remote",
        {
            "endpoint": "https://s3.example.org",
            "bucket": "models",
            "credentialsSecret": "keys",
            "workloadIdentity": True,
        },
        f"{CHECKPOINT}.remote.workloadIdentity",
        ["remove one"],
    ),
    (
        "half a byte",
        f"{CHECKPOINT}.memory.sizeLimit",
        1.5,
        f"{CHECKPOINT}.memory.sizeLimit",
        ["512Mi"],
    ),
    ("restore", "spec.restore", "latest", "spec.restore", ["expected fields"]),
]


@pytest.mark.parametrize(
    ("path", "value", "named", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_a_mistake_is_one_line_that_names_the_field_and_what_to_write(
    path: str, value: Any, named: str, words: list[str]
) -> None:
    told = problems(changed(path, value))
    own = [line for line in told if line.startswith(f"{named}: ")]
    assert len(own) == 1, told
    assert "\n" not in own[0]
    for word in words:
        assert word in own[0], own[0]


@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_a_single_mistake_makes_no_other_lines(case: tuple[Any, ...]) -> None:
    _, path, value, named, _ = case
    told = problems(changed(path, value))
    if case[0] in ("no trainer", "the sidecar's name"):  # the trainer is then missing as well
        return
    if case[0] == "keys and an identity":  # and an account that has the rights
        return
    assert [line.partition(":")[0] for line in told] == [named]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_fields() -> None:
    tree = changed("spec.replicas", "x")
    tree["metadata"]["name"] = "X"
    tree["spec"]["checkpoint"]["memory"] = {"everySteps": -1, "sizeLimit": "1Gi"}
    paths = [line.partition(":")[0] for line in problems(tree)]
    assert paths == ["metadata.name", "spec.replicas", "spec.checkpoint.memory.everySteps"]


@pytest.mark.parametrize("tree", [None, [], "text", 5], ids=repr)
def test_what_is_no_mapping_is_told_as_such(tree: Any) -> None:
    assert problems(tree) == [f"manifest: got {tree!r}; expected fields, one `name: value` a line"]


@pytest.mark.parametrize("tree", [{}, {"spec": None}, {"spec": {"checkpoint": None}}], ids=repr)
def test_an_almost_empty_manifest_gives_a_list_of_what_to_write(tree: Any) -> None:
    told = problems(tree)
    assert len(told) >= 4
    assert all("write" in line for line in told)


def test_a_long_value_is_shortened_in_the_message() -> None:
    (line,) = problems(changed("spec.launcher", "x" * 5000))
    assert len(line) < 250


def test_a_valid_manifest_is_read_with_its_defaults() -> None:
    job = read_job(copy.deepcopy(BASE))
    spec = job.spec
    assert (job.name, job.namespace, job.run) == ("gpt", "default", "default/gpt")
    assert (spec.replicas, spec.processes_per_replica, job.world_size) == (2, 1, 2)
    assert spec.launcher == "torchrun"
    assert spec.checkpoint.memory.size_limit_bytes == 1 << 30
    assert spec.checkpoint.memory.schedule.every_steps == 10
    assert spec.checkpoint.local is not None
    assert spec.checkpoint.local.retention.keep_last == 2
    assert spec.checkpoint.remote is not None
    assert spec.checkpoint.remote.endpoint == "https://s3.example.org"
    assert spec.restore.choice is None


def test_fields_of_the_cluster_have_defaults_and_are_read() -> None:
    spec = read_job(copy.deepcopy(BASE)).spec
    assert (spec.drain_hold_seconds, spec.node_lost_seconds, spec.final_save_seconds) == (
        300,
        0,
        300,
    )
    assert (spec.cleanup_pod_policy, spec.ttl_seconds_after_finished) == ("Running", None)
    assert (spec.queue_name, spec.failure_policy.early_deaths) == ("", 6)
    assert spec.restore.choice is None
    neighbor = spec.checkpoint.neighbor
    assert neighbor is not None
    assert (neighbor.topology_key, neighbor.copies) == ("topology.kubernetes.io/zone", 1)
    tree = copy.deepcopy(BASE)
    tree["spec"] |= {
        "drainHoldSeconds": 60,
        "nodeLostSeconds": 40,
        "finalSaveSeconds": 0,
        "cleanupPodPolicy": "All",
        "ttlSecondsAfterFinished": 0,
        "queueName": "gpus",
        "failurePolicy": {"earlyDeaths": 3},
        "restore": {"from": {"namespace": "old", "runName": "gpt"}, "step": 5},
    }
    tree["spec"]["checkpoint"]["remote"]["caSecret"] = "ca"
    spec = read_job(tree).spec
    assert (spec.drain_hold_seconds, spec.node_lost_seconds, spec.final_save_seconds) == (60, 40, 0)
    assert (spec.cleanup_pod_policy, spec.ttl_seconds_after_finished) == ("All", 0)
    assert (spec.queue_name, spec.failure_policy.early_deaths) == ("gpus", 3)
    choice = spec.restore.choice
    assert choice is not None
    assert (choice.run, choice.run_step, choice.step) == ("old/gpt", 5, -1)
    assert spec.checkpoint.remote is not None
    assert spec.checkpoint.remote.ca_secret == "ca"


def test_what_the_api_server_adds_to_a_manifest_is_no_mistake() -> None:
    tree = copy.deepcopy(BASE)
    tree["metadata"] |= {"uid": "x", "generateName": "gpt-", "managedFields": [], "generation": 1}
    assert read_job(tree | {"status": {"step": 3}})


def test_a_bare_host_becomes_https_and_http_only_when_asked() -> None:
    secure = changed("spec.checkpoint.remote.endpoint", "minio:9000")
    remote = read_job(copy.deepcopy(secure)).spec.checkpoint.remote
    assert remote is not None
    assert remote.endpoint == "https://minio:9000"
    secure["spec"]["checkpoint"]["remote"]["secure"] = False
    remote = read_job(secure).spec.checkpoint.remote
    assert remote is not None
    assert remote.endpoint == "http://minio:9000"


def test_local_volume_none_means_no_local_tier() -> None:
    tree = changed("spec.checkpoint.local", {"volume": "none"})
    del tree["spec"]["checkpoint"]["neighbor"]
    assert read_job(tree).spec.checkpoint.local is None


def test_flags_of_the_users_own_program_are_not_ours_to_judge() -> None:
    command = ["torchrun", "train.py", "--nnodes", "3"]
    assert read_job(changed(f"{CONTAINER}.command", command))


def test_a_choice_by_hand_carries_a_token_that_changes_with_it() -> None:
    one = read_job(changed("spec.restore", {"step": 100, "attempt": 5})).spec.restore.choice
    two = read_job(changed("spec.restore", {"step": 100, "attempt": 6})).spec.restore.choice
    assert one is not None
    assert two is not None
    assert (one.step, one.attempt) == (100, 5)
    assert one.token != two.token


def test_a_program_without_a_launcher_is_one_process_a_pod() -> None:
    tree = changed("spec.processesPerReplica", 2)
    tree["spec"]["launcher"] = "none"
    assert problems(tree) == [
        "spec.processesPerReplica: got 2 with launcher none, which starts one process a pod; "
        "expected 1; write `launcher: torchrun`, or 1 here and more replicas"
    ]


@pytest.mark.parametrize(
    ("memory", "local", "words"),
    [
        ({"everySeconds": 30}, {"everySteps": 10}, "at no fixed steps; expected everySeconds"),
        ({"everySeconds": 30}, {"everySeconds": 5}, "at least memory.everySeconds (30)"),
    ],
    ids=["steps of seconds", "more often than captured"],
)
def test_a_tier_can_not_ask_for_what_is_not_captured(
    memory: dict[str, Any], local: dict[str, Any], words: str
) -> None:
    tree = changed("spec.checkpoint.local", local)
    tree["spec"]["checkpoint"]["memory"] = {"sizeLimit": "1Gi", **memory}
    (line,) = problems(tree)
    assert line.startswith("spec.checkpoint.local.every")
    assert words in line


def test_a_path_is_of_a_host_path_only_and_volumes_and_resources_have_their_shapes() -> None:
    tree = changed("spec.checkpoint.local", {"volume": "ephemeral", "size": "1Gi", "path": "/x"})
    tree["spec"]["podTemplate"]["spec"]["volumes"] = {"name": "x"}
    container = tree["spec"]["podTemplate"]["spec"]["containers"][0]
    container |= {"resources": "2 CPUs", "workingDir": 5}
    told = [line.partition(":")[0] for line in problems(tree)]
    assert told == [
        "spec.podTemplate.spec.volumes",
        f"{SHOWN}.resources",
        f"{SHOWN}.workingDir",
        "spec.checkpoint.local.path",
    ]


def test_another_run_means_its_newest_or_the_step_beside_it() -> None:
    other = {"namespace": "team", "runName": "base"}
    newest = read_job(changed("spec.restore", {"from": other})).spec.restore.choice
    named = read_job(changed("spec.restore", {"from": other, "step": 9, "attempt": 2}))
    choice = named.spec.restore.choice
    assert newest is not None
    assert choice is not None
    assert (newest.run, newest.run_step, newest.run_attempt) == ("team/base", -1, 0)
    assert (choice.run, choice.run_step, choice.run_attempt) == ("team/base", 9, 2)
    assert newest.token != choice.token
    assert (newest.step, choice.step) == (-1, -1)  # an older leader finds nothing under that


def test_a_fresh_start_is_a_choice_by_hand() -> None:
    choice = read_job(changed("spec.restore", {"fresh": True})).spec.restore.choice
    assert choice is not None
    assert (choice.fresh, choice.run, choice.step) == (True, "", -1)


def test_another_run_needs_a_bucket_to_be_read_from() -> None:
    tree = changed("spec.restore", {"from": {"namespace": "team", "runName": "base"}})
    del tree["spec"]["checkpoint"]["remote"]
    with pytest.raises(InvalidJob, match="run team/base is read from the remote tier"):
        read_job(tree)


def test_the_own_run_is_not_another_one() -> None:
    own = read_job(copy.deepcopy(BASE)).run.split("/")
    tree = changed("spec.restore", {"from": {"namespace": own[0], "runName": own[1]}})
    with pytest.raises(InvalidJob, match="names this job's own run"):
        read_job(tree)
