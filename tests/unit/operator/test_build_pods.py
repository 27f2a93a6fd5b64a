"""Pods, topology and launcher environment that are made of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backstay_operator.api import TrainingJob
from backstay_operator.api.job import EPHEMERAL, PVC, RemoteSpec
from backstay_operator.api.names import SIDECAR
from backstay_operator.errors import Unbuildable
from backstay_operator.manifests import (
    Addresses,
    Wiring,
    build_pod,
    build_topology,
    launcher_env,
    pod_identity,
)
from backstay_operator.manifests.pods import ANNOTATION_IDENTITY
from backstay_operator.settings import SidecarSettings
from backstay_protocol import codec
from backstay_protocol.topology import PodIdentity, Topology

GENERATIONS = {0: 100, 1: 100, 2: 103}


@pytest.fixture
def wiring() -> Wiring:
    return Wiring(
        uid="uid-1",
        cluster="west",
        addresses=Addresses.in_cluster("gpt", 3, "uid-1"),
        first_generation=100,
        sidecar=SidecarSettings(image="backstay-sidecar:1"),
    )


@pytest.fixture
def pod(job: TrainingJob, wiring: Wiring) -> dict[str, Any]:
    return build_pod(job, pod_identity(2, GENERATIONS, 101), wiring)


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def trainer_of(pod: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in pod["spec"]["containers"] if c["name"] == "trainer")


@pytest.mark.parametrize(
    ("launcher", "together"), [("torchrun", False), ("static", True), ("none", True)]
)
def test_a_hang_ends_all_replicas_where_the_launcher_restarts_no_world(
    job: TrainingJob, wiring: Wiring, launcher: str, together: bool
) -> None:
    other = replace(job, spec=replace(job.spec, launcher=launcher))
    assert build_topology(other, wiring).leave_together is together


def test_a_pods_name_and_labels_carry_replica_and_generation(pod: dict[str, Any]) -> None:
    metadata = pod["metadata"]
    assert metadata["name"] == "gpt-2-103"
    assert metadata["namespace"] == "team"
    assert metadata["labels"] == {
        "team": "blue",
        "backstay.dev/job": "gpt",
        "backstay.dev/run": "gpt",
        "backstay.dev/replica-index": "2",
        "backstay.dev/generation": "103",
    }


def test_the_identity_travels_as_an_annotation_into_a_file(pod: dict[str, Any]) -> None:
    text = pod["metadata"]["annotations"][ANNOTATION_IDENTITY]
    identity = codec.loads(PodIdentity, text)
    assert identity == PodIdentity(replica=2, generation=103, current=GENERATIONS, replaces=101)
    config = next(v for v in pod["spec"]["volumes"] if v["name"] == "backstay-config")
    (item,) = config["projected"]["sources"][1]["downwardAPI"]["items"]
    assert item["path"] == "pod.json"
    assert ANNOTATION_IDENTITY in item["fieldRef"]["fieldPath"]


def test_a_pod_has_a_stable_padded_hostname_and_restarts_in_place(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["hostname"] == "gpt-00002"
    assert spec["subdomain"] == "gpt"
    assert spec["restartPolicy"] == "OnFailure"
    assert spec["automountServiceAccountToken"] is False
    assert spec["terminationGracePeriodSeconds"] == 120
    keys = {toleration["key"] for toleration in spec["tolerations"]}
    assert keys == {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}


def test_the_users_container_keeps_what_it_says(job: TrainingJob, pod: dict[str, Any]) -> None:
    trainer, theirs = trainer_of(pod), job.spec.trainer
    for field in ("image", "command", "resources"):
        assert trainer[field] == theirs[field]
    assert env_of(trainer)["SEED"] == "7"
    assert "BACKSTAY_VOLUME" not in str(job.spec.pod_template), "the template is not written to"


def test_the_users_environment_and_hook_win(job: TrainingJob, wiring: Wiring) -> None:
    template = dict(job.spec.pod_template)
    trainer = {
        **job.spec.trainer,
        "env": [{"name": "OMP_NUM_THREADS", "value": "3"}],
        "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
        "volumeMounts": [{"name": "big", "mountPath": "/dev/shm"}],
        "terminationMessagePolicy": "File",
    }
    template["spec"] = {"containers": [trainer]}
    changed = replace(job, spec=replace(job.spec, pod_template=template))
    built = trainer_of(build_pod(changed, pod_identity(0, GENERATIONS, 0), wiring))
    assert env_of(built)["OMP_NUM_THREADS"] == "3"
    assert [e["name"] for e in built["env"]].count("OMP_NUM_THREADS") == 1
    assert built["lifecycle"]["preStop"] == {"exec": {"command": ["true"]}}
    assert [m["name"] for m in built["volumeMounts"]].count("backstay-shm") == 0
    assert built["terminationMessagePolicy"] == "File"


def test_the_sidecar_is_native_probed_and_told_where_all_is(pod: dict[str, Any]) -> None:
    (sidecar,) = pod["spec"]["initContainers"]
    assert sidecar["name"] == "backstay-sidecar"
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"] == {"path": "/healthz", "port": 7071}
    env = env_of(sidecar)
    assert env["BACKSTAY_VOLUME"] == "/backstay/memory"
    assert env["BACKSTAY_TOPOLOGY"] == "/backstay/config/topology.json"
    assert env["BACKSTAY_POD"] == "/backstay/config/pod.json"
    assert env["BACKSTAY_TOKEN"]["secretKeyRef"] == {"name": "gpt-backstay", "key": "token"}
    assert env["BACKSTAY_S3_ACCESS_KEY"]["secretKeyRef"]["optional"] is True


def test_both_see_one_memory_volume_of_the_named_size(pod: dict[str, Any]) -> None:
    memory = next(v for v in pod["spec"]["volumes"] if v["name"] == "backstay-memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": str(1 << 30)}
    for container in (trainer_of(pod), pod["spec"]["initContainers"][0]):
        mounts = {m["name"]: m for m in container["volumeMounts"]}
        assert mounts["backstay-memory"]["mountPath"] == "/backstay/memory"
    mounts = {m["name"]: m for m in trainer_of(pod)["volumeMounts"]}
    assert mounts["backstay-local"]["readOnly"] is True


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            {"hostPath": {"path": "/var/lib/backstay", "type": "DirectoryOrCreate"}},
        ),
        (
            {"volume": PVC, "size": "5Gi"},
            {"persistentVolumeClaim": {"claimName": "gpt-00002-backstay"}},
        ),
        (
            {"volume": EPHEMERAL, "size": "5Gi", "storage_class_name": "fast"},
            {
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "accessModes": ["ReadWriteOnce"],
                            "resources": {"requests": {"storage": "5Gi"}},
                            "storageClassName": "fast",
                        }
                    }
                }
            },
        ),
    ],
    ids=["hostPath", "pvc", "ephemeral"],
)
def test_the_local_volume_is_what_the_job_asks_for(
    job: TrainingJob, wiring: Wiring, changes: dict[str, str], expected: dict[str, Any]
) -> None:
    assert job.spec.checkpoint.local is not None
    local = replace(job.spec.checkpoint.local, **changes)  # type: ignore[arg-type]
    checkpoint = replace(job.spec.checkpoint, local=local)
    changed = replace(job, spec=replace(job.spec, checkpoint=checkpoint))
    pod = build_pod(changed, pod_identity(2, GENERATIONS, 0), wiring)
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "backstay-local")
    assert volume == {"name": "backstay-local", **expected}


def test_without_a_local_tier_nothing_of_a_disk_is_mounted(
    job: TrainingJob, wiring: Wiring
) -> None:
    checkpoint = replace(job.spec.checkpoint, local=None, neighbor=None, remote=None)
    changed = replace(job, spec=replace(job.spec, checkpoint=checkpoint))
    pod = build_pod(changed, pod_identity(0, GENERATIONS, 0), wiring)
    assert "backstay-local" not in str(pod)
    assert "BACKSTAY_S3" not in str(pod)
    topology = build_topology(changed, wiring)
    assert topology.tiers.local is None
    assert topology.tiers.remote is None


# --- launcher -------------------------------------------------------------------------------------


def pod_of(replica: int, generation: int = 7) -> PodIdentity:
    return PodIdentity(replica=replica, generation=generation, current={}, replaces=0)


def test_an_agent_is_told_from_its_successor_and_its_rank_stays(
    job: TrainingJob, wiring: Wiring
) -> None:
    """Tried with torchrun in pid namespaces: by the host's name alone, a pod that was cut off takes
    its successor out of the world when it comes back.
    """

    def name(replica: int, generation: int) -> str:
        return launcher_env(job, pod_of(replica, generation), wiring.addresses, 120)[
            "PET_LOCAL_ADDR"
        ]

    assert name(1, 7) != name(1, 8)
    assert name(0, 7) == name(0, 8) == "gpt-00000.gpt", "others connect to it"
    assert name(0, 9) < name(1, 10) < name(2, 9)


@pytest.mark.parametrize(
    "hosts", [("10.0.0.1", "10.0.0.10"), ("a", "a.b"), ("10.0.0.8", "10.0.1.2")]
)
def test_generations_do_not_change_the_order_of_addresses(
    job: TrainingJob, hosts: tuple[str, str]
) -> None:
    addresses = Addresses(hosts={0: "1", 1: hosts[0], 2: hosts[1]}, rendezvous_id="u")
    names = [
        launcher_env(job, pod_of(replica, 9 - replica), addresses, 120)["PET_LOCAL_ADDR"]
        for replica in range(3)
    ]
    assert names == sorted(names)


def test_torchrun_gets_the_recipe_that_lets_one_agent_restart_the_world(
    job: TrainingJob, wiring: Wiring
) -> None:
    env = launcher_env(job, pod_of(2), wiring.addresses, 120)
    assert env == {
        "OMP_NUM_THREADS": "2",
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "2",
        "PET_SHUTDOWN_TIMEOUT": "90",
        "BACKSTAY_EXIT_WITH_PARENT": "1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": "uid-1",
        "PET_RDZV_ENDPOINT": "gpt-00000.gpt:29400",
        "PET_RDZV_CONF": "is_host=0,keep_alive_interval=2,keep_alive_max_attempt=3,"
        "join_timeout=600",
        "PET_LOCAL_ADDR": "gpt-00002.gpt-7",
        "PET_MAX_RESTARTS": "1000",
        "PET_MONITOR_INTERVAL": "0.1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    assert "is_host=1" in launcher_env(job, pod_of(0), wiring.addresses, 120)["PET_RDZV_CONF"]


def test_static_never_restarts_its_own_workers(job: TrainingJob, wiring: Wiring) -> None:
    static = replace(job, spec=replace(job.spec, launcher="static"))
    env = launcher_env(static, pod_of(1), wiring.addresses, 120)
    assert env["PET_MAX_RESTARTS"] == "0"
    assert (env["PET_NODE_RANK"], env["PET_MASTER_ADDR"]) == ("1", "gpt-00000.gpt")
    assert "PET_RDZV_BACKEND" not in env


def test_without_a_launcher_the_program_is_its_rank(job: TrainingJob, wiring: Wiring) -> None:
    alone = replace(job, spec=replace(job.spec, launcher="none", processes_per_replica=1))
    env = launcher_env(alone, pod_of(1), wiring.addresses, 120)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("1", "3", "0")
    assert not any(name.startswith("PET_") for name in env)


def test_addresses_sort_as_the_replicas_do_up_to_the_largest_jobs() -> None:
    addresses = Addresses.in_cluster("job", 1200, "u")
    in_order = [addresses.hosts[i] for i in range(1200)]
    assert in_order == sorted(in_order)
    with pytest.raises(AssertionError):
        Addresses(hosts={i: f"10.0.0.{i}" for i in range(11)}, rendezvous_id="u")


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ({}, "1"),
        ({"limits": {"cpu": "500m"}}, "1"),
        ({"limits": {"cpu": 16}}, "8"),
        ({"requests": {"cpu": "6"}}, "3"),
        ({"requests": {"cpu": "6"}, "limits": {"cpu": "2"}}, "1"),
    ],
    ids=str,
)
def test_the_containers_cpus_are_shared_by_its_ranks(
    job: TrainingJob, wiring: Wiring, resources: dict[str, Any], threads: str
) -> None:
    trainer = {**job.spec.trainer, "resources": resources}
    template = {"spec": {"containers": [trainer]}}
    changed = replace(job, spec=replace(job.spec, pod_template=template))
    assert launcher_env(changed, pod_of(0), wiring.addresses, 120)["OMP_NUM_THREADS"] == threads


# --- topology -------------------------------------------------------------------------------------


def test_the_topology_says_all_that_a_sidecar_needs_and_survives_json(
    job: TrainingJob, wiring: Wiring
) -> None:
    topology = build_topology(job, wiring)
    assert codec.loads(Topology, codec.dumps(topology)) == topology
    assert topology.run == "team/gpt"
    assert topology.owner == "west/uid-1"
    assert topology.world_size == 6
    assert topology.first_generation == 100
    assert [p.address for p in topology.peers] == [f"gpt-0000{i}.gpt:7070" for i in range(3)]
    tiers = topology.tiers
    assert tiers.memory.schedule.every_steps == 10
    assert tiers.local is not None
    assert (tiers.local.root, tiers.local.retention.keep_last) == ("/backstay/local", 3)
    assert tiers.remote is not None
    assert tiers.remote.endpoint == "https://s3.example.org"
    assert tiers.outermost == "remote"


def test_an_embedded_store_is_refused_where_there_is_none(job: TrainingJob, wiring: Wiring) -> None:
    remote = RemoteSpec(embedded=True, bucket="checkpoints")
    checkpoint = replace(job.spec.checkpoint, remote=remote)
    changed = replace(job, spec=replace(job.spec, checkpoint=checkpoint))
    with pytest.raises(Unbuildable, match="endpoint"):
        build_topology(changed, wiring)
    given = replace(wiring, remote_endpoint="http://127.0.0.1:1")
    tiers = build_topology(changed, given).tiers
    assert tiers.remote is not None
    assert tiers.remote.endpoint == "http://127.0.0.1:1"


def with_remote(job: TrainingJob, **fields: Any) -> TrainingJob:
    remote = RemoteSpec(endpoint="https://store", bucket="b", **fields)
    checkpoint = replace(job.spec.checkpoint, remote=remote)
    return replace(job, spec=replace(job.spec, checkpoint=checkpoint))


def sidecar_of(pod: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in pod["spec"]["initContainers"] if c["name"] == SIDECAR)


def test_trainer_and_sidecar_trust_the_authority_of_the_store_and_nobody_waits_for_it(
    job: TrainingJob, wiring: Wiring
) -> None:
    other = with_remote(job, ca_secret="my-ca", credentials_secret="keys")
    pod = build_pod(other, pod_identity(2, GENERATIONS, 101), wiring)
    (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "backstay-s3-ca"]
    assert volume["secret"]["secretName"] == "my-ca"
    assert volume["secret"]["optional"] is True
    for container in (trainer_of(pod), sidecar_of(pod)):
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == volume["name"]]
        assert mount["readOnly"] is True
        assert env_of(container)["BACKSTAY_S3_CA_FILE"] == f"{mount['mountPath']}/ca.crt"


def test_by_identity_the_sidecar_gets_no_keys_and_the_pod_no_token(
    job: TrainingJob, wiring: Wiring
) -> None:
    other = with_remote(job, workload_identity=True)
    pod = build_pod(other, pod_identity(2, GENERATIONS, 101), wiring)
    env = env_of(sidecar_of(pod))
    assert env["BACKSTAY_S3_AMBIENT"] == "1"
    assert not [name for name in env if name.endswith("_KEY")]
    assert "BACKSTAY_S3_AMBIENT" not in env_of(trainer_of(pod))
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_a_file_of_the_machine_stands_for_the_authoritys_secret(
    job: TrainingJob, wiring: Wiring
) -> None:
    other = with_remote(job, ca_secret="my-ca", credentials_secret="keys")
    here = replace(wiring, s3_ca_file="/etc/ca.pem")
    pod = build_pod(other, pod_identity(2, GENERATIONS, 101), here)
    for container in (trainer_of(pod), sidecar_of(pod)):
        assert env_of(container)["BACKSTAY_S3_CA_FILE"] == "/etc/ca.pem"
        assert "backstay-s3-ca" not in [m["name"] for m in container["volumeMounts"]]
