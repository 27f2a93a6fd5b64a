"""What goes to the API server: a job's objects, and pods as a cluster wants them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from backstay_operator.api import TrainingJob
from backstay_operator.api.job import EPHEMERAL, PVC, LocalSpec
from backstay_operator.manifests import Addresses, Wiring, build_topology, pod_identity
from backstay_operator.manifests.cluster_pod import (
    build_cluster_pod,
    build_flush_pod,
    spec_digest,
)
from backstay_operator.manifests.objects import (
    build_claim,
    build_config_map,
    build_disruption_budget,
    build_network_policy,
    build_secret,
    build_service,
    token_of,
)
from backstay_operator.settings import SidecarSettings
from backstay_protocol import codec
from backstay_protocol.topology import Topology

Tree = dict[str, Any]
IDENTITY = pod_identity(1, {0: 7, 1: 8, 2: 7}, 7)


def wiring(job: TrainingJob, **sidecar: Any) -> Wiring:
    return Wiring(
        uid="u1",
        cluster="c1",
        addresses=Addresses.in_cluster(job.name, job.spec.replicas, "u1"),
        first_generation=7,
        sidecar=SidecarSettings(image="sidecar:1", pull_policy="IfNotPresent", **sidecar),
    )


def pod_of(job: TrainingJob, **more: Any) -> Tree:
    return build_cluster_pod(job, IDENTITY, wiring(job), **more)


def sidecar_of(pod: Tree) -> Tree:
    found: Tree = next(c for c in pod["spec"]["initContainers"] if c["name"] == "backstay-sidecar")
    return found


def with_local(job: TrainingJob, local: LocalSpec | None) -> TrainingJob:
    checkpoint = replace(job.spec.checkpoint, local=local)
    return replace(job, spec=replace(job.spec, checkpoint=checkpoint))


# --- objects -------------------------------------------------------------------------------------


def test_everything_of_a_job_is_owned_by_it_and_holds_nobody_up(job: TrainingJob) -> None:
    topology = build_topology(job, wiring(job))
    for tree in (
        build_service(job, "u1"),
        build_secret(job, "u1", "t"),
        build_config_map(job, "u1", topology),
        build_disruption_budget(job, "u1"),
        build_network_policy(job, "u1", "backstay"),
        pod_of(job),
    ):
        (owner,) = tree["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("u1", True)
        assert owner["blockOwnerDeletion"] is False
        assert tree["metadata"]["namespace"] == "team"


def test_pods_have_names_before_they_are_ready(job: TrainingJob) -> None:
    spec = build_service(job, "u1")["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True


def test_names_outlive_a_deleted_job_for_as_long_as_its_leader_saves(job: TrainingJob) -> None:
    leader = {"metadata": {"name": "gpt-0-7", "uid": "u7"}}
    first, second = build_service(job, "u1", leader)["metadata"]["ownerReferences"]
    assert (first["uid"], first["controller"]) == ("u1", True)
    assert (second["kind"], second["uid"], second["controller"]) == ("Pod", "u7", False)


def test_a_token_comes_back_from_its_secret(job: TrainingJob) -> None:
    assert token_of(build_secret(job, "u1", "secret-token")) == "secret-token"
    assert token_of({"data": {}}) == ""


def test_the_topology_in_the_config_map_is_what_sidecars_read(job: TrainingJob) -> None:
    topology = build_topology(job, wiring(job))
    text = build_config_map(job, "u1", topology)["data"]["topology.json"]
    read = codec.loads(Topology, text.encode())
    assert read == topology
    assert read.address_of(2) == "gpt-00002.gpt:7070"


def test_no_pod_is_evicted_behind_our_back_but_sick_ones_hold_no_drain(job: TrainingJob) -> None:
    spec = build_disruption_budget(job, "u1")["spec"]
    assert spec["minAvailable"] == 3
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_only_the_job_itself_and_the_operator_reach_its_api(job: TrainingJob) -> None:
    inside, operator, health = build_network_policy(job, "u1", "backstay")["spec"]["ingress"]
    assert "ports" not in inside
    assert inside["from"] == [{"podSelector": {"matchLabels": {"backstay.dev/job": "gpt"}}}]
    assert [port["port"] for port in operator["ports"]] == [7070]
    (who,) = operator["from"]
    assert who["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "backstay"}
    assert [port["port"] for port in health["ports"]] == [7071]


def test_a_claim_outlives_its_job(job: TrainingJob) -> None:
    local = LocalSpec(volume=PVC, size="10Gi", storage_class_name="fast")
    claim = build_claim(job, local, 2)
    assert "ownerReferences" not in claim["metadata"]
    assert claim["metadata"]["name"] == "gpt-00002-backstay"
    assert claim["spec"]["storageClassName"] == "fast"
    assert (
        "storageClassName" not in build_claim(job, replace(local, storage_class_name=""), 0)["spec"]
    )


# --- pods ----------------------------------------------------------------------------------------


def test_the_sidecar_has_no_more_rights_than_its_volume_needs(job: TrainingJob) -> None:
    on_host = sidecar_of(pod_of(job))["securityContext"]
    assert on_host["runAsUser"] == 0  # the kubelet makes a hostPath folder for root
    other = sidecar_of(pod_of(with_local(job, LocalSpec(volume=EPHEMERAL, size="1Gi"))))
    assert other["securityContext"]["runAsNonRoot"] is True
    for context in (on_host, other["securityContext"]):
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_trainer_and_sidecar_share_a_group_unless_the_user_chose_one(job: TrainingJob) -> None:
    assert pod_of(job)["spec"]["securityContext"]["fsGroup"] == 65532
    template = copy.deepcopy(dict(job.spec.pod_template))
    template["spec"]["securityContext"] = {"fsGroup": 5, "runAsUser": 1000}
    local = LocalSpec(volume=EPHEMERAL, size="1Gi")
    changed = with_local(replace(job, spec=replace(job.spec, pod_template=template)), local)
    pod = pod_of(changed)
    assert pod["spec"]["securityContext"]["fsGroup"] == 5
    assert sidecar_of(pod)["securityContext"]["runAsUser"] == 1000


def test_a_container_sees_only_its_own_runs_folder_of_the_nodes_disk(job: TrainingJob) -> None:
    pod = pod_of(job)
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "backstay-local")
    assert volume["hostPath"]["path"] == "/var/lib/backstay/team/gpt"
    for container in (*pod["spec"]["containers"], sidecar_of(pod)):
        mounts = [m for m in container["volumeMounts"] if m["name"] == "backstay-local"]
        assert [m["mountPath"] for m in mounts] == ["/backstay/local/team/gpt"]


def test_the_sidecar_listens_where_port_forwards_come_in(job: TrainingJob) -> None:
    sidecar = sidecar_of(pod_of(job))
    assert sidecar["args"][-2:] == ["--listen", "0.0.0.0"]
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"]
              for e in sidecar["env"] if "fieldRef" in e.get("valueFrom", {})}  # fmt: skip
    assert fields == {"BACKSTAY_POD_IP": "status.podIP", "BACKSTAY_NODE": "spec.nodeName"}
    assert sidecar["imagePullPolicy"] == "IfNotPresent"


def test_a_replacement_prefers_the_old_disk_and_keeps_the_users_wishes(job: TrainingJob) -> None:
    assert "affinity" not in pod_of(job)["spec"]
    template = copy.deepcopy(dict(job.spec.pod_template))
    term = {"weight": 1, "preference": {"matchExpressions": []}}
    wish = {"preferredDuringSchedulingIgnoredDuringExecution": [term]}
    template["spec"]["affinity"] = {"nodeAffinity": wish, "podAffinity": {"x": []}}
    changed = replace(job, spec=replace(job.spec, pod_template=template))
    affinity = pod_of(changed, near_node="n7")["spec"]["affinity"]
    theirs, ours = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert theirs == term
    assert ours["preference"]["matchExpressions"][0]["values"] == ["n7"]
    assert affinity["podAffinity"] == {"x": []}


def test_a_queued_job_asks_for_all_its_pods_as_one_group(job: TrainingJob) -> None:
    assert "kueue.x-k8s.io/queue-name" not in pod_of(job)["metadata"]["labels"]
    queued = replace(job, spec=replace(job.spec, queue_name="research"))
    metadata = pod_of(queued)["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert metadata["labels"]["kueue.x-k8s.io/pod-group-pod-index"] == "1"
    assert metadata["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "3"


def test_a_flush_pod_is_the_sidecar_alone_beside_the_data_under_the_replicas_name(
    job: TrainingJob,
) -> None:
    queued = replace(job, spec=replace(job.spec, queue_name="research"))
    pod = build_flush_pod(queued, IDENTITY, wiring(queued), "n7")
    assert pod["metadata"]["name"] == "gpt-1-8-flush"
    (only,) = pod["spec"]["containers"]
    assert only["name"] == "backstay-sidecar"
    assert only["args"][-1] == "--flush"
    assert "restartPolicy" not in only
    assert pod["spec"]["nodeName"] == "n7"
    assert pod["spec"]["hostname"] == "gpt-00001"
    assert "initContainers" not in pod["spec"]
    assert "kueue.x-k8s.io/queue-name" not in pod["metadata"]["labels"]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in only["volumeMounts"]}


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"suspend": True}, False),
        ({"hang_seconds": 9.0}, False),
        ({"drain_hold_seconds": 9}, False),
        ({"pod_template": {"spec": {"containers": [{"name": "trainer", "image": "b"}]}}}, True),
        ({"processes_per_replica": 1}, True),
        ({"launcher": "static"}, True),
    ],
    ids=["suspend", "hang", "drain", "template", "processes", "launcher"],
)
def test_what_makes_other_pods(job: TrainingJob, change: Tree, other: bool) -> None:
    changed = replace(job, spec=replace(job.spec, **change))
    assert (spec_digest(changed) != spec_digest(job)) == other


def test_an_upgraded_sidecar_makes_no_other_pods(job: TrainingJob) -> None:
    old = build_cluster_pod(job, IDENTITY, wiring(job))
    new = build_cluster_pod(job, IDENTITY, wiring(job, cpu="2"))
    digest = "backstay.dev/spec-digest"
    assert old["metadata"]["annotations"][digest] == new["metadata"]["annotations"][digest]
