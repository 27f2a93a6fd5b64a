"""`backstay restore`: what would be taken, by the leader or by what is kept; what to write."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from backstay_cli.cluster import ClusterJob, Kubectl
from backstay_cli.told import told_by_cluster
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import Candidate, CheckpointList, RestorePreview
from backstay_protocol.names import URL_CHECKPOINTS, URL_RESTORE_PREVIEW
from backstay_protocol.records import AttemptFile
from backstay_protocol.topology import ManualChoice
from support.calling import call
from support.fake_kubectl import FakeKubectl, named
from support.fake_leader import ATTEMPT, TOKEN, FakeLeader
from support.fake_sidecar import checkpoint_status
from support.plain_run import DEAD, LIVE, PlainRun

BASE = CheckpointId(1200, ATTEMPT)


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlainRun:
    monkeypatch.setenv("BACKSTAY_HOME", str(tmp_path / "home"))
    return PlainRun(tmp_path)


@pytest.fixture
def leader() -> Iterator[FakeLeader]:
    with FakeLeader() as found:
        found.answers[URL_RESTORE_PREVIEW] = RestorePreview(
            run="team/gpt",
            attempt=ATTEMPT,
            outcome="base",
            reason="step 1200 is the newest on the lineage",
            checkpoint=BASE,
            candidates=(Candidate(checkpoint=BASE, taken=True, why="whole", tiers=("local",)),),
        )
        yield found


def ask(leader: FakeLeader, *options: str):
    return call("restore", "--address", leader.address, *options, BACKSTAY_TOKEN=TOKEN)


# --- by the leader --------------------------------------------------------------------------------


def test_the_leader_is_asked_what_it_would_take(leader: FakeLeader) -> None:
    done = ask(leader, "--dry-run")
    assert done.exit_code == 0, done.output
    assert f"a restore now would take step 1200 of attempt {ATTEMPT}" in done.stdout
    assert f"taken  step 1200 of attempt {ATTEMPT} (local): whole" in done.stdout
    assert json.loads(ask(leader, "--dry-run", "-o", "json").stdout)["source"] == "the leader"


def test_a_persons_choice_is_put_to_the_leader(leader: FakeLeader) -> None:
    path = f"{URL_RESTORE_PREVIEW}?step=7&attempt=3"
    leader.answers[path] = RestorePreview(
        run="team/gpt", attempt=ATTEMPT, outcome="refuse", reason="step 7 can't be restored"
    )
    done = ask(leader, "--dry-run", "--step", "7", "--attempt", "3")
    assert done.exit_code == 1
    assert "a restore now would be refused" in done.stdout
    assert "step 7 can't be restored" in done.stdout
    assert leader.asked == [f"GET {path}"]


def test_a_leader_of_an_older_version_is_told_apart(leader: FakeLeader) -> None:
    leader.answers.clear()
    done = ask(leader, "--dry-run")
    assert done.exit_code == 1
    assert "of a version that can't tell what a restore would take" in done.output


# --- by what is kept ------------------------------------------------------------------------------


def preview(plain: PlainRun, *options: str) -> dict[str, object]:
    where = ("--state-dir", str(plain.state.root))
    done = call("restore", "--dry-run", *where, *options, "-o", "json")
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_of_a_stopped_job_its_disks_tell_what_a_restore_would_take(plain: PlainRun) -> None:
    found = preview(plain)
    assert found["source"] == "its disks alone; no leader was asked"
    told = found["preview"]
    assert isinstance(told, dict)
    assert told["checkpoint"] == str(CheckpointId(35, LIVE))
    by_name = {one["checkpoint"]: one for one in told["candidates"]}
    assert [one["taken"] for one in told["candidates"]] == [True, False, False, False, False]
    assert "off the lineage" in by_name[str(CheckpointId(30, DEAD))]["why"]
    assert by_name[str(CheckpointId(35, LIVE))]["tiers"] == ["local", "neighbor"]


def test_a_step_is_previewed_as_a_choice_by_hand(plain: PlainRun) -> None:
    told = preview(plain, "--step", "30", "--attempt", str(DEAD))["preview"]
    assert isinstance(told, dict)
    assert told["checkpoint"] == str(CheckpointId(30, DEAD))
    where = ("--state-dir", str(plain.state.root))
    off = call("restore", "--dry-run", *where, "--step", "30")
    assert off.exit_code == 1
    assert "step 30 on the lineage, which can't be restored" in off.stdout


def test_a_choice_in_the_manifest_counts_until_it_was_applied(
    plain: PlainRun, tmp_path: Path
) -> None:
    manifest = tmp_path / "job.yaml"
    tree = {
        "apiVersion": "backstay.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "plain", "namespace": "team"},
        "spec": {
            "replicas": 2,
            "podTemplate": {"spec": {"containers": [{"name": "trainer", "command": ["a"]}]}},
            "checkpoint": {"memory": {"everySteps": 5, "sizeLimit": "1Gi"}, "local": {}},
            "restore": {"step": 25, "attempt": LIVE},
        },
    }
    manifest.write_text(yaml.safe_dump(tree))
    record = plain.state.read()
    assert record is not None
    plain.state.write(replace(record, manifest=str(manifest)))
    told = preview(plain)["preview"]
    assert isinstance(told, dict)
    assert told["checkpoint"] == str(CheckpointId(25, LIVE))
    choice = f"25-{LIVE}"
    persisted = replace(record.record, choice=choice, choice_number=7)
    plain.state.write(replace(record, manifest=str(manifest), record=persisted))
    for replica in range(2):
        file = AttemptFile(plain.disk(replica).attempt_file)
        state = file.read()
        assert state is not None
        assert state.record is not None
        applied = replace(state.record, choice=f"{choice}@7")
        file.write(replace(state, record=applied))
    told = preview(plain)["preview"]
    assert isinstance(told, dict)
    assert told["checkpoint"] == str(CheckpointId(35, LIVE))


def test_where_nothing_is_kept_a_restore_would_start_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKSTAY_HOME", str(tmp_path / "home"))
    plain = PlainRun(tmp_path, checkpoints=())
    for replica in range(2):
        Path(plain.disk(replica).attempt_file).unlink()
    done = call("restore", "--dry-run", "--state-dir", str(plain.state.root))
    assert done.exit_code == 0, done.output
    assert "would start from nothing, at step 0" in done.stdout


# --- what to write --------------------------------------------------------------------------------


def test_of_a_local_job_the_field_and_the_next_command_are_told(plain: PlainRun) -> None:
    done = call("restore", "--state-dir", str(plain.state.root), "--step", "25", "-o", "json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert yaml.safe_load(told["manifest"]) == {"spec": {"restore": {"step": 25, "attempt": LIVE}}}
    assert told["commands"] == ["backstay local run MANIFEST"]


def test_a_step_that_is_not_there_is_told_before_anything_is_written(plain: PlainRun) -> None:
    where = ("--state-dir", str(plain.state.root))
    assert call("restore", *where, "--step", "99").exit_code == 3
    off = call("restore", *where, "--step", "30")
    assert off.exit_code == 3
    assert "not on the lineage" in off.output


def test_without_a_step_there_is_nothing_to_write(plain: PlainRun) -> None:
    done = call("restore", "--state-dir", str(plain.state.root))
    assert done.exit_code == 2
    assert "--dry-run" in done.output
    alone = call("restore", "--attempt", "3")
    assert alone.exit_code == 2
    assert "--attempt needs --step" in alone.output


def test_of_a_job_in_a_cluster_the_patches_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leader: FakeLeader
) -> None:
    kubectl = FakeKubectl(tmp_path, monkeypatch)
    job = named("gpt", spec={"replicas": 1, "checkpoint": {}})
    job["metadata"]["namespace"] = "team"
    kubectl.add("trainingjobs.backstay.dev", job)
    labels = {
        "backstay.dev/job": "gpt",
        "backstay.dev/replica-index": "0",
        "backstay.dev/generation": "7",
    }
    kubectl.add("pod", named("gpt-0-7", labels=labels, status={"phase": "Running"}))
    kubectl.add(
        "secret", named("gpt-backstay", data={"token": base64.b64encode(TOKEN.encode()).decode()})
    )
    kubectl.set(forwards={"gpt-0-7": leader.address})
    leader.answers[URL_CHECKPOINTS] = CheckpointList(
        run="team/gpt", attempt=ATTEMPT, checkpoints=(checkpoint_status(BASE, ("local",)),)
    )
    done = call("restore", "-n", "team", "--job", "gpt", "--step", "1200")
    assert done.exit_code == 0, done.output
    restore = f'{{"spec":{{"restore":{{"step":1200,"attempt":{ATTEMPT}}}}}}}'
    assert f"kubectl -n team patch tj gpt --type merge -p '{restore}'" in done.stdout
    assert "suspend" not in done.stdout
    assert not [line for line in kubectl.calls if "patch" in line]
    previewed = call("restore", "--dry-run", "-n", "team", "--job", "gpt")
    assert f"take step 1200 of attempt {ATTEMPT}" in previewed.stdout


@pytest.mark.parametrize(
    ("options", "query", "manifest"),
    [
        (["--fresh"], "?fresh=true", {"fresh": True}),
        (
            ["--from", "lab/old"],
            "?run=lab%2Fold",
            {"from": {"namespace": "lab", "runName": "old"}},
        ),
        (
            ["--from", "lab/old", "--step", "9", "--attempt", "3"],
            "?run=lab%2Fold&step=9&attempt=3",
            {"from": {"namespace": "lab", "runName": "old"}, "step": 9, "attempt": 3},
        ),
    ],
    ids=["from nothing", "another run's newest", "another run's step"],
)
def test_other_contents_are_asked_of_the_leader_and_written_as_the_manifest_says_it(
    plain: PlainRun, leader: FakeLeader, options: list[str], query: str, manifest: object
) -> None:
    leader.answers[URL_RESTORE_PREVIEW + query] = RestorePreview(
        run="team/gpt",
        attempt=ATTEMPT,
        outcome="origin",
        reason="as it was named",
        checkpoint=CheckpointId(9, 3),
        checkpoint_run="lab/old",
    )
    done = ask(leader, "--dry-run", *options)
    assert "would take step 9 of attempt 3 of run lab/old" in done.stdout, done.output
    told = call("restore", "--state-dir", str(plain.state.root), *options, "-o", "json")
    assert yaml.safe_load(json.loads(told.stdout)["manifest"]) == {"spec": {"restore": manifest}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fresh", "--step", "3"], "--fresh excludes"),
        (["--fresh", "--from", "a/b"], "--fresh excludes"),
        (["--from", "gpt"], "NAMESPACE/RUN NAME"),
    ],
    ids=str,
)
def test_what_can_not_be_asked_for_together_is_told(
    plain: PlainRun, options: list[str], words: str
) -> None:
    done = call("restore", "--state-dir", str(plain.state.root), *options)
    assert done.exit_code == 2
    assert words in done.output


def test_a_job_in_a_cluster_tells_its_size_and_choice_with_what_the_operator_wrote_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = FakeKubectl(tmp_path, monkeypatch)
    container = {"name": "trainer", "image": "gpt:1", "command": ["torchrun", "train.py"]}
    spec = {
        "replicas": 2,
        "processesPerReplica": 4,
        "podTemplate": {"spec": {"serviceAccountName": "robot", "containers": [container]}},
        "checkpoint": {"memory": {"everySteps": 5, "sizeLimit": "1Gi"}, "local": {}},
        "restore": {"step": 25, "quarantineAfter": 5},
    }
    generations = {"first": 7, "newest": 7, "choice": "25-0", "choiceNumber": 3}
    job = named("gpt", spec=spec, status={"generations": generations})
    job |= {"apiVersion": "backstay.dev/v1alpha1", "kind": "TrainingJob"}
    job["metadata"]["namespace"] = "team"
    kubectl.add("trainingjobs.backstay.dev", job)
    with ClusterJob(Kubectl(namespace="team"), "gpt") as found:
        told = told_by_cluster(found)
    assert told.world_size == 8
    assert told.restore.quarantine_after == 5
    assert told.restore.choice == ManualChoice(token="25-0@3", step=25)
