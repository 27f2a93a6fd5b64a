"""`backstay validate`: all that is wrong, by file and by cluster; what is unknown is not wrong."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.calling import call
from support.fake_kubectl import FakeKubectl, named

CRD = "trainingjobs.backstay.dev"


def job(**checkpoint: Any) -> dict[str, Any]:
    """A job as for a cluster."""
    return {
        "apiVersion": "backstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpt", "namespace": "team"},
        "spec": {
            "replicas": 2,
            "podTemplate": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "gpt:1",
                            "command": ["torchrun", "train.py"],
                            "resources": {"limits": {"memory": "4Gi"}},
                        }
                    ]
                }
            },
            "checkpoint": {
                "memory": {"everySteps": 50, "sizeLimit": "1Gi"},
                "local": {},
                "remote": {
                    "endpoint": "http://127.0.0.1:1",
                    "bucket": "models",
                    "credentialsSecret": "keys",
                },
                **checkpoint,
            },
        },
    }


def write(folder: Path, *trees: Any) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump_all(trees))
    return str(path)


def lines(output: str, verdict: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(verdict)]


# --- the file -------------------------------------------------------------------------------------


def test_a_good_manifest_is_ok(tmp_path: Path) -> None:
    done = call("validate", write(tmp_path, job()))
    assert done.exit_code == 0, done.output
    assert "TrainingJob team/gpt can be read: 2 ranks in 2 pods" in done.stdout
    assert not lines(done.stdout, "problem")


def test_every_mistake_has_a_line_with_its_place(tmp_path: Path) -> None:
    tree = job(memory={"everySteps": "often", "sizeLimit": "1Gi"})
    tree["spec"]["replicas"] = 0
    path = write(tmp_path, tree)
    done = call("validate", path)
    assert done.exit_code == 2
    assert len(lines(done.stdout, "problem")) == 2
    number = Path(path).read_text().splitlines().index("  replicas: 0") + 1
    assert f"{path}:{number}: spec.replicas" in done.stdout
    assert "spec.checkpoint.memory.everySteps: got 'often'" in done.stdout


def test_memory_that_can_not_hold_the_slots_is_told_with_the_number(tmp_path: Path) -> None:
    done = call("validate", write(tmp_path, job(memory={"everySteps": 5, "sizeLimit": "8Gi"})))
    assert done.exit_code == 2
    assert "memory limit is 4.0 GiB; needed are at least" in done.stdout
    assert "raise resources.limits.memory" in done.stdout


def test_several_documents_are_read_and_strangers_passed_over(tmp_path: Path) -> None:
    other = job()
    other["metadata"]["name"] = "Bad_Name"
    path = write(tmp_path, {"apiVersion": "v1", "kind": "Secret"}, job(), other)
    done = call("validate", path)
    assert done.exit_code == 2
    assert "a Secret: no concern of Backstay" in done.stdout
    assert "TrainingJob team/gpt can be read" in done.stdout
    assert "metadata.name: got 'Bad_Name'" in done.stdout


def test_standard_input_is_read() -> None:
    done = call("validate", "-", input=yaml.safe_dump(job()))
    assert done.exit_code == 0, done.output
    broken = call("validate", "-", input="a: [")
    assert broken.exit_code == 2
    assert "problem  standard input: not YAML" in broken.stdout


def test_files_that_are_missing_or_hold_no_job_are_told_with_the_rest(tmp_path: Path) -> None:
    good = write(tmp_path, job())
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    done = call("validate", good, str(empty), str(tmp_path / "none.yaml"))
    assert done.exit_code == 2
    assert "empty.yaml: no TrainingJob is in it" in done.stdout
    assert "none.yaml: there is no such file" in done.stdout
    assert "TrainingJob team/gpt can be read" in done.stdout
    assert call("validate", str(tmp_path / "none.yaml")).exit_code == 3


def test_what_only_a_cluster_refuses_is_unknown_without_one(tmp_path: Path) -> None:
    tree = job()
    tree["spec"]["podTemplate"]["spec"]["serviceAccountName"] = "robot"
    del tree["spec"]["podTemplate"]["spec"]["containers"][0]["image"]
    local = job(remote={"embedded": True})
    del local["metadata"]["namespace"]
    done = call("validate", write(tmp_path, local))
    assert done.exit_code == 0, done.output
    assert "in a cluster: spec.checkpoint.remote.embedded" in lines(done.stdout, "unknown")[0]


# --- the cluster ----------------------------------------------------------------------------------


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    """A cluster in which the job can run."""
    fake = FakeKubectl(tmp_path, monkeypatch)
    definition = named(CRD)
    definition["metadata"]["annotations"] = {"backstay.dev/schema": "1"}
    fake.add("crd", definition)
    labels = {"app.kubernetes.io/part-of": "backstay", "app.kubernetes.io/component": "operator"}
    allow = {"serviceAccounts": ["default", "robot"]}
    config = {"allow": allow, "sidecar": {"image": "sidecar:1"}}
    settings = {"operator.yaml": yaml.safe_dump(config)}
    fake.add("configmap", named("backstay-operator", labels=labels, data=settings))
    label = {"pod-security.kubernetes.io/enforce": "privileged"}
    fake.add("namespace", named("team", labels=label))
    fake.add("serviceaccount", named("default"))
    fake.add("secret", secret("keys", accessKey="a", secretKey="s3cr3t"))
    return fake


def secret(name: str, **values: str) -> dict[str, Any]:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return named(name, data=data)


def server(tmp_path: Path, *options: str, tree: Any = None) -> Any:
    return call("validate", "--server", write(tmp_path, tree or job()), *options)


def test_in_a_cluster_that_has_all_of_it_every_line_is_ok(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    done = server(tmp_path)
    assert done.exit_code == 0, done.output
    assert not lines(done.stdout, "problem") + lines(done.stdout, "unknown")
    for words in (
        "definition trainingjobs.backstay.dev: is installed, schema 1",
        "operator: its settings are read",
        "namespace team: exists",
        "the API server takes it",
        "Secret keys: has accessKey and secretKey",
        "Pod Security 'privileged' allows hostPath",
        "service account default: exists",
    ):
        assert words in done.stdout
    assert any("--namespace=team apply --dry-run=server" in one for one in kubectl.calls)
    assert "s3cr3t" not in done.output


def test_each_thing_that_is_missing_is_a_problem_with_its_cure(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    for kind in ("crd", "serviceaccount", "secret", "namespace"):
        kubectl.remove(kind)
    kubectl.add(
        "namespace", named("team", labels={"pod-security.kubernetes.io/enforce": "baseline"})
    )
    kubectl.add("secret", secret("keys", accessKey="a"))
    told = lines(server(tmp_path).stdout, "problem")
    assert len(told) == 4
    assert any("helm install backstay" in line for line in told)
    assert any("service account default: does not exist" in line for line in told)
    assert any("Secret keys: has no secretKey" in line for line in told)
    assert any("'baseline' forbids the hostPath volume" in line for line in told)


def test_a_namespace_that_does_not_exist_is_told_once(tmp_path: Path, kubectl: FakeKubectl) -> None:
    kubectl.remove("namespace")
    done = server(tmp_path)
    assert done.exit_code == 2
    (line,) = lines(done.stdout, "problem")
    assert "kubectl create namespace team" in line


def test_an_old_definition_is_a_problem(tmp_path: Path, kubectl: FakeKubectl) -> None:
    kubectl.remove("crd")
    old = named(CRD)
    old["metadata"]["annotations"] = {"backstay.dev/schema": "0"}
    kubectl.add("crd", old)
    assert "has schema 0, this command knows 1" in server(tmp_path).stdout


def test_what_the_api_server_refuses_is_told_field_by_field(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    kubectl.set(
        apply='The TrainingJob "gpt" is invalid: \n'
        "* spec.replicas: Invalid value: 7: can not change while the job runs\n"
        "* spec.checkpoint.runName: Invalid value: another run is another job"
    )
    told = lines(server(tmp_path).stdout, "problem")
    assert [line.partition("refuses it: ")[2].split(":")[0] for line in told] == [
        "spec.replicas",
        "spec.checkpoint.runName",
    ]


def test_what_may_not_be_read_is_unknown_and_no_problem(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    kubectl.forbid("crd", "configmap", "namespace", "serviceaccount", "secret")
    kubectl.set(apply='Error from server (Forbidden): User "ann" cannot patch trainingjobs')
    done = server(tmp_path)
    assert done.exit_code == 0, done.output
    told = lines(done.stdout, "unknown")
    assert len(told) == 7
    assert any("you may not apply it there" in line for line in told)


def test_the_operators_own_allow_list_is_what_counts(tmp_path: Path, kubectl: FakeKubectl) -> None:
    tree = job()
    tree["spec"]["podTemplate"]["spec"]["serviceAccountName"] = "robot"
    kubectl.add("serviceaccount", named("robot"))
    assert server(tmp_path, tree=tree).exit_code == 0
    tree["spec"]["podTemplate"]["spec"]["serviceAccountName"] = "admin"
    assert "allow-list (allowed: default, robot)" in server(tmp_path, tree=tree).stdout
    kubectl.forbid("configmap")
    done = server(tmp_path, tree=tree)
    assert done.exit_code == 0, done.output
    assert any("allow-list (allowed: default)" in line for line in lines(done.stdout, "unknown"))


def test_a_job_goes_to_its_own_namespace_else_to_the_given_one_else_to_the_contexts(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    tree = job()
    kubectl.set(namespace="here")
    for name in ("here", "given"):
        kubectl.add("namespace", named(name))
    assert "namespace team: exists" in server(tmp_path, "-n", "given", tree=tree).stdout
    del tree["metadata"]["namespace"]
    assert "TrainingJob given/gpt" in server(tmp_path, "-n", "given", tree=tree).stdout
    assert "TrainingJob here/gpt" in server(tmp_path, tree=tree).stdout


def test_a_cluster_that_is_away_is_unreachable(tmp_path: Path, kubectl: FakeKubectl) -> None:
    kubectl.set(down=True)
    done = server(tmp_path)
    assert done.exit_code == 5
    assert "was refused" in done.output


def test_what_kubectl_can_not_even_read_is_a_mistake_of_use(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    log = 'E1201 04:19:17.276559 1 memcache.go:265] "Unhandled Error" err="..."\n'
    kubectl.set(broken=log + "error: stat /nowhere: no such file or directory")
    done = server(tmp_path)
    assert done.exit_code == 2
    assert "check --kubeconfig and --context" in done.output
    assert "memcache" not in done.output


def test_a_bucket_that_is_out_of_reach_from_here_is_unknown(
    tmp_path: Path, kubectl: FakeKubectl
) -> None:
    done = server(tmp_path, "--check-bucket", "-o", "json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["problems"], told["unknown"]) == (0, 1)
    (found,) = [one for one in told["findings"] if one["verdict"] == "unknown"]
    assert found["where"] == "bucket models at http://127.0.0.1:1"
    assert "the cluster's nodes may reach it" in found["text"]
