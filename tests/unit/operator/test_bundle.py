"""`backstay support-bundle`: what is in it, what is missing, and that no secret ever is."""

from __future__ import annotations

import base64
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from backstay_protocol.messages import AgentStatus, CheckpointList, ReplicaView
from backstay_protocol.names import URL_CHECKPOINTS, URL_JOB, URL_METRICS, URL_STATUS
from support.calling import call
from support.fake_kubectl import FakeKubectl, named
from support.fake_leader import ATTEMPT, TOKEN, FakeLeader, job_view, tier
from support.plain_run import PlainRun

ACCESS, SECRET = "access-key-of-the-bucket", "secret-key-of-the-bucket"
PASSWORD = "hunter22hunter22"
OPERATOR = {"app.kubernetes.io/part-of": "backstay", "app.kubernetes.io/component": "operator"}


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTAY_HOME", str(tmp_path / "home"))


@pytest.fixture
def leader() -> Iterator[FakeLeader]:
    with FakeLeader() as found:
        replica = ReplicaView(replica=0, generation=7, address="", seen_seconds_ago=0.1)
        found.answers |= {
            URL_JOB: job_view(tier("local", 1200), replicas=(replica,)),
            URL_CHECKPOINTS: CheckpointList(run="team/gpt", attempt=ATTEMPT, checkpoints=()),
            URL_STATUS: AgentStatus(run="team/gpt", replica=0),
            URL_METRICS: b"backstay_step 1210\n",
        }
        yield found


def unpack(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive.getmembers():
            assert member.name.startswith("backstay-bundle/")
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("backstay-bundle/")] = file.read()
    return found


def secret(name: str, **values: str) -> dict[str, Any]:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return named(name, kind="Secret", data=data)


def pod(replica: int, *, restarts: int = 0) -> dict[str, Any]:
    labels = {
        "backstay.dev/job": "gpt",
        "backstay.dev/replica-index": str(replica),
        "backstay.dev/generation": "7",
    }
    status = {"name": "trainer", "restartCount": restarts}
    return named(
        f"gpt-{replica}-7",
        labels=labels,
        spec={
            "nodeName": "worker-1",
            "containers": [
                {"name": "trainer", "env": [{"name": "DB_PASSWORD", "value": PASSWORD}]}
            ],
        },
        status={
            "phase": "Running",
            "containerStatuses": [status],
            "initContainerStatuses": [{"name": "backstay-sidecar", "restartCount": 0}],
        },
    )


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leader: FakeLeader) -> FakeKubectl:
    """A namespace `team` with a job `gpt` of two replicas; the second one's sidecar is away."""
    fake = FakeKubectl(tmp_path, monkeypatch)
    remote = {"endpoint": "http://127.0.0.1:1", "bucket": "b", "credentialsSecret": "keys"}
    job = named("gpt", spec={"checkpoint": {"remote": remote}}, status={"ready": "2/2"})
    job["metadata"]["namespace"] = "team"
    fake.add("trainingjobs.backstay.dev", job)
    fake.add("pod", pod(0, restarts=1))
    fake.add("pod", pod(1))
    operator = named("operator-1", labels=OPERATOR)
    operator["metadata"]["namespace"] = "backstay-system"
    operator |= {"status": {"phase": "Running", "containerStatuses": [{"name": "operator"}]}}
    fake.add("pod", operator)
    fake.add("configmap", named("operator", labels=OPERATOR, data={"operator.yaml": "a: 1"}))
    fake.add("configmap", named("gpt-backstay", labels={"backstay.dev/job": "gpt"}))
    fake.add("secret", secret("gpt-backstay", token=TOKEN))
    fake.add("secret", secret("keys", accessKey=ACCESS, secretKey=SECRET))
    for name in ("worker-1", "worker-2"):
        fake.add("node", named(name, spec={}, status={"conditions": [], "images": ["big"]}))
    for name in ("gpt", "gpt-0-7", "other"):
        fake.add("event", {"involvedObject": {"name": name}, "message": f"about {name}"})
    fake.set(
        logs={
            "gpt-0-7/trainer": f"step 1\nlogging in with {SECRET}\n",
            "gpt-0-7/trainer/previous": f"DB_PASSWORD={PASSWORD}\nTraceback\n",
            "gpt-0-7/backstay-sidecar": f"token {TOKEN}\n" + "line of a log\n" * 200_000,
            "gpt-1-7/trainer": "step 1\n",
            "operator-1/operator": "reconciled\n",
        },
        forwards={"gpt-0-7": leader.address},
    )
    return fake


def bundle(tmp_path: Path, *options: str, **env: str) -> tuple[dict[str, bytes], Any]:
    out = tmp_path / "trouble.tar.gz"
    done = call("support-bundle", "--out", str(out), *options, "-o", "json", **env)
    assert done.exit_code == 0, done.output
    assert out.stat().st_mode & 0o777 == 0o600
    index = json.loads(done.stdout)
    parts = unpack(out)
    assert json.loads(parts["index.json"]) == index
    named_in_index = {entry["path"] for entry in index["files"]}
    assert named_in_index == parts.keys() - {"index.json", "MISSING"}
    assert parts.get("MISSING", b"").decode().splitlines() == index["missing"]
    return parts, index


def assert_without(parts: dict[str, bytes], *secrets: str) -> None:
    for path, data in parts.items():
        for one in secrets:
            assert one.encode() not in data, path
            assert base64.b64encode(one.encode()) not in data, path


def test_of_a_job_in_a_cluster_all_parts_are_there(tmp_path: Path, kubectl: FakeKubectl) -> None:
    parts, index = bundle(tmp_path, "-n", "team", "--job", "gpt")
    assert index["about"] == "TrainingJob team/gpt"
    assert json.loads(parts["trainingjob.json"])["status"] == {"ready": "2/2"}
    assert len(json.loads(parts["pods.json"])) == 2
    assert parts["logs/gpt-0-7/trainer.log"].startswith(b"step 1\n")
    assert b"Traceback" in parts["logs/gpt-0-7/trainer.previous.log"]
    assert parts["operator/logs/operator-1/operator.log"] == b"reconciled\n"
    assert json.loads(parts["leader/job.json"])["step"] == 1210
    assert json.loads(parts["sidecars/0/status.json"])["run"] == "team/gpt"
    assert parts["sidecars/0/metrics.txt"] == b"backstay_step 1210\n"
    told = {event["message"] for event in json.loads(parts["events.json"])}
    assert told == {"about gpt", "about gpt-0-7"}
    (node,) = json.loads(parts["nodes.json"])
    assert (node["name"], "images" in node["status"]) == ("worker-1", False)
    assert json.loads(parts["secrets.json"])["keys"] == ["accessKey", "secretKey"]
    assert "objects/configmap.json" in parts


def test_no_secret_is_in_it(tmp_path: Path, kubectl: FakeKubectl) -> None:
    parts, _ = bundle(tmp_path, "-n", "team", "--job", "gpt")
    assert_without(parts, TOKEN, ACCESS, SECRET, PASSWORD)
    assert b"logging in with ***" in parts["logs/gpt-0-7/trainer.log"]


def test_of_a_long_log_the_end_is_there(tmp_path: Path, kubectl: FakeKubectl) -> None:
    parts, index = bundle(tmp_path, "-n", "team", "--job", "gpt", "--log-mib", "1")
    path = "logs/gpt-0-7/backstay-sidecar.log"
    assert len(parts[path]) <= 1 << 20
    assert parts[path].startswith(b"line of a log\n")
    cut = {entry["path"] for entry in index["files"] if entry["cut"]}
    assert cut == {path}


def test_each_missing_part_is_a_line_and_the_rest_is_there(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    kubectl.forbid("node", "event", "secret", "crd")
    parts, index = bundle(tmp_path, "-n", "team", "--job", "gpt")
    missing = "\n".join(index["missing"])
    for path in (
        "nodes.json",
        "events.json",
        "secrets.json",
        "definition.json",
        "leader",
        "remote",
    ):
        assert f"{path}: " in missing
    assert "Forbidden" in missing
    assert "logs/gpt-0-7/trainer.log" in parts
    assert "logs/gpt-1-7/backstay-sidecar.log" in missing


def test_the_pods_in_trouble_come_first_where_not_all_are_looked_into(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    parts, index = bundle(tmp_path, "-n", "team", "--job", "gpt", "--pods", "1")
    assert "logs/gpt-0-7/trainer.log" in parts
    assert "logs/gpt-1-7/trainer.log" not in parts
    assert any("of 1 of 2 pods are left out" in line for line in index["missing"])


def test_a_job_that_is_not_there_makes_no_file(tmp_path: Path, kubectl: FakeKubectl) -> None:
    out = tmp_path / "x.tar.gz"
    assert call("support-bundle", "--out", str(out), "-n", "team", "--job", "nope").exit_code == 3
    kubectl.set(down=True)
    assert call("support-bundle", "--out", str(out), "-n", "team", "--job", "gpt").exit_code == 5
    assert not out.exists()


def test_of_a_stopped_local_job_folder_and_logs_are_there(tmp_path: Path) -> None:
    plain = PlainRun(tmp_path)
    token = plain.state.token()
    log = plain.state.logs / "plain-0-1" / "trainer.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"hello {token}\n")
    (plain.state.root / "pods" / "plain-0-1").mkdir(parents=True)
    (plain.state.root / "pods" / "plain-0-1" / "topology.json").write_text('{"job": "plain"}')
    parts, index = bundle(tmp_path, "--state-dir", str(plain.state.root))
    assert index["about"] == "local job team/plain (stopped)"
    assert parts["logs/plain-0-1/trainer.log"] == b"hello ***\n"
    assert json.loads(parts["status.json"])["job"] == "plain"
    assert b"/00000.safetensors" in parts["disks.tsv"]
    assert json.loads(parts["pods/plain-0-1/topology.json"]) == {"job": "plain"}
    assert_without(parts, token)
    assert any(line.startswith("leader: ") for line in index["missing"])


def test_a_local_jobs_manifest_is_in_it_with_its_secrets_masked(tmp_path: Path) -> None:
    manifest = tmp_path / "job.yaml"
    manifest.write_text(f"# {PASSWORD}\nenv: [{{name: MY_API_KEY, value: {PASSWORD}}}]\nsteps: 5\n")
    plain = PlainRun(tmp_path)
    record = plain.state.read()
    assert record is not None
    plain.state.write(replace(record, manifest=str(manifest)))
    parts, _ = bundle(tmp_path, "--state-dir", str(plain.state.root))
    assert yaml.safe_load(parts["manifest.yaml"])["steps"] == 5
    assert_without(parts, PASSWORD)


def test_by_a_sidecars_address_what_sidecars_say_is_there(
    tmp_path: Path, leader: FakeLeader
) -> None:
    parts, _ = bundle(tmp_path, "--address", leader.address, BACKSTAY_TOKEN=TOKEN)
    assert json.loads(parts["leader/job.json"])["phase"] == "Training"
    assert_without(parts, TOKEN)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "there.tar.gz"
    out.write_text("mine")
    done = call("support-bundle", "--out", str(out))
    assert done.exit_code == 2
    assert out.read_text() == "mine"
