"""What an administrator allows: each refusal is one line that says what to change and who can."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from backstay_operator.api import (
    Allowances,
    InvalidJob,
    RemoteAllowance,
    read_allowances,
    read_job,
)

TRAINER = {"name": "trainer", "image": "gpt:1", "command": ["torchrun", "train.py"]}
BASE: dict[str, Any] = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "gpt", "namespace": "research"},
    "spec": {
        "replicas": 2,
        "podTemplate": {
            "spec": {"containers": [TRAINER]},
        },
        "checkpoint": {
            "memory": {"everySteps": 10, "sizeLimit": "1Gi"},
            "local": {},
            "remote": {
                "endpoint": "https://s3.example.org",
                "bucket": "models",
                "credentialsSecret": "keys",
            },
        },
    },
}
STRICT = read_allowances({})
CONTAINER = "spec.podTemplate.spec.containers[0]"


def manifest(path: str, value: Any) -> dict[str, Any]:
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


def refused(tree: Any, allow: Allowances = STRICT) -> InvalidJob:
    with pytest.raises(InvalidJob) as caught:
        read_job(tree, allow)
    return caught.value


POD = "spec.podTemplate.spec"
# (id, field, value, path that the line names, the chart value that would allow it)
WISHES = [
    (
        "service account",
        f"{POD}.serviceAccountName",
        "admin",
        f"{POD}.serviceAccountName",
        {"serviceAccounts": ["default", "admin"]},
    ),
    (
        "its deprecated name",
        f"{POD}.serviceAccount",
        "admin",
        f"{POD}.serviceAccount",
        {"serviceAccounts": ["admin"]},
    ),
    (
        "host path",
        f"{POD}.volumes",
        [{"name": "x", "hostPath": {"path": "/opt/torch/lib"}}],
        f"{POD}.volumes[0].hostPath",
        {"hostPaths": ["/opt/torch"]},
    ),
    (
        "local path",
        "spec.checkpoint.local.path",
        "/etc/kubernetes",
        "spec.checkpoint.local.path",
        {"localPaths": ["/var/lib/backstay", "/etc/kubernetes"]},
    ),
    ("host network", f"{POD}.hostNetwork", True, f"{POD}.hostNetwork", {"privileged": True}),
    ("host pids", f"{POD}.hostPID", True, f"{POD}.hostPID", {"privileged": True}),
    (
        "privileged",
        f"{POD}.containers.0.securityContext",
        {"privileged": True},
        f"{CONTAINER}.securityContext.privileged",
        {"privileged": True},
    ),
    (
        "capabilities",
        f"{POD}.containers.0.securityContext",
        {"capabilities": {"add": ["CHOWN", "SYS_ADMIN"]}},
        f"{CONTAINER}.securityContext.capabilities.add",
        {"privileged": True},
    ),
    (
        "unmasked proc",
        f"{POD}.containers.0.securityContext",
        {"procMount": "Unmasked"},
        f"{CONTAINER}.securityContext.procMount",
        {"privileged": True},
    ),
    (
        "host port",
        f"{POD}.containers.0.ports",
        [{"containerPort": 80, "hostPort": 80}],
        f"{CONTAINER}.ports",
        {"privileged": True},
    ),
    (
        "privileged init container",
        f"{POD}.initContainers",
        [{"name": "x", "image": "x", "securityContext": {"privileged": True}}],
        f"{POD}.initContainers[0].securityContext.privileged",
        {"privileged": True},
    ),
    (
        "endpoint",
        "spec.checkpoint.remote.endpoint",
        "https://elsewhere.example.org",
        "spec.checkpoint.remote.endpoint",
        {"remotes": {"*": [{"endpoint": "https://elsewhere.example.org:443"}]}},
    ),
]


@pytest.mark.parametrize("wish", WISHES, ids=[w[0] for w in WISHES])
def test_a_wish_that_is_not_allowed_is_one_line_with_the_value_that_would_allow_it(
    wish: tuple[Any, ...],
) -> None:
    _, path, value, named, allowed = wish
    elsewhere = {"remotes": {"*": [{"endpoint": "https://s3.example.org"}]}}
    error = refused(manifest(path, value), read_allowances(elsewhere))
    (problem,) = error.problems
    assert problem.path == named
    assert "administrator" in problem.text
    assert f"policy.allow.{next(iter(allowed))}" in problem.text
    assert "\n" not in str(problem)
    assert error.reason == "NotAllowed"


@pytest.mark.parametrize("wish", WISHES, ids=[w[0] for w in WISHES])
def test_the_same_wish_is_granted_once_the_chart_allows_it(wish: tuple[Any, ...]) -> None:
    _, path, value, _, allowed = wish
    assert read_job(manifest(path, value), read_allowances(allowed))


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/opt/torch", True),
        ("/opt/torch/", True),
        ("//opt//torch/lib", True),
        ("/opt/torchvision", False),
        ("/opt/torch/../../etc", False),
        ("/opt/torch/lib/..", False),
        ("/opt", False),
        ("/", False),
        ("opt/torch", False),
        ("", False),
    ],
)
def test_a_host_path_is_allowed_with_what_lies_below_it_and_nothing_else(
    path: str, allowed: bool
) -> None:
    allow = Allowances(host_paths=("/opt/torch/",))
    assert (allow.refuses_host_path(path) == "") == allowed


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/var/lib/backstay", True), ("/var/lib/backstay/team-b/run", False), ("/var/lib", False)],
)
def test_below_a_folder_of_checkpoints_lie_those_of_others_so_it_is_allowed_exactly(
    path: str, allowed: bool
) -> None:
    assert (STRICT.refuses_local_path(path) == "") == allowed


def test_remotes_are_allowed_by_namespace_endpoint_and_bucket() -> None:
    store, other = "https://s3.example.org", "http://minio:9000"
    allow = Allowances(
        remotes={
            "research": (RemoteAllowance(endpoint=store, buckets=("models", "team")),),
            "*": (RemoteAllowance(endpoint=other),),
        }
    )
    assert allow.refuses_remote("research", "https://S3.example.org:443", "team") == ("", "")
    assert allow.refuses_remote("research", other, "anything") == ("", "")
    field, why = allow.refuses_remote("research", store, "secret")
    assert (field, "models, team" in why) == ("bucket", True)
    field, why = allow.refuses_remote("play", store, "models")
    assert (field, f"allowed for namespace play: {other}" in why) == ("endpoint", True)
    assert allow.refuses_remote("play", "http://minio", "x")[0] == "endpoint"
    assert Allowances().refuses_remote("any", "https://any", "any") == ("", "")


def test_what_is_wrong_besides_makes_the_reason_invalid() -> None:
    tree = manifest("spec.podTemplate.spec.serviceAccountName", "admin")
    tree["spec"]["replicas"] = 0
    assert refused(tree).reason == "Invalid"


@pytest.mark.parametrize(
    ("path", "value", "named", "words"),
    [
        (f"{POD}.containers.0.image", ..., f"{CONTAINER}.image", "missing; expected an image"),
        (
            "spec.checkpoint.remote.credentialsSecret",
            ...,
            "spec.checkpoint.remote.credentialsSecret",
            "workloadIdentity: true",
        ),
        (
            "spec.checkpoint.remote",
            {"embedded": True},
            "spec.checkpoint.remote.embedded",
            "local run",
        ),
    ],
    ids=["image", "credentials", "embedded store"],
)
def test_a_cluster_asks_for_what_only_a_local_run_can_do_without(
    path: str, value: Any, named: str, words: str
) -> None:
    tree = manifest(path, value)
    (problem,) = refused(tree).problems
    assert problem.path == named
    assert words in problem.text
    assert read_job(tree)


def test_workload_identity_needs_an_account_and_no_keys() -> None:
    tree = manifest("spec.checkpoint.remote.workloadIdentity", True)
    (problem,) = refused(tree).problems[1:] or refused(tree).problems
    assert "serviceAccountName" in problem.path or "remove one" in problem.text
    del tree["spec"]["checkpoint"]["remote"]["credentialsSecret"]
    (problem,) = refused(tree).problems
    assert problem.path == f"{POD}.serviceAccountName"
    tree["spec"]["podTemplate"]["spec"]["serviceAccountName"] = "writer"
    allow = read_allowances({"serviceAccounts": ["default", "writer"]})
    remote = read_job(tree, allow).spec.checkpoint.remote
    assert remote is not None
    assert remote.workload_identity


def test_the_operators_settings_are_read_with_their_defaults() -> None:
    assert STRICT.service_accounts == ("default",)
    assert STRICT.host_paths == ()
    assert STRICT.local_paths == ("/var/lib/backstay",)
    assert not STRICT.privileged
    assert not STRICT.remotes
    assert STRICT.cluster
    assert read_allowances(None) == STRICT


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"serviceAcounts": []}, "allow.serviceAcounts"),
        ({"serviceAccounts": "default"}, "allow.serviceAccounts"),
        ({"hostPaths": ["opt"]}, "allow.hostPaths"),
        ({"privileged": "no"}, "allow.privileged"),
        ({"remotes": []}, "allow.remotes"),
        ({"remotes": {"*": {}}}, "allow.remotes.*"),
        ({"remotes": {"*": [{}]}}, "allow.remotes.*[0].endpoint"),
        ({"remotes": {"*": ["x"]}}, "allow.remotes.*[0]"),
    ],
    ids=str,
)
def test_a_mistake_in_the_settings_names_the_setting(tree: Any, path: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        read_allowances(tree)
    assert path in [problem.path for problem in caught.value.problems]
