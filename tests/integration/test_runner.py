"""`backstay local run` as a person uses it, with a stand-in for sidecar and trainer.

What is proven here is the runner's own part: what it starts, restarts, replaces, tells and leaves
behind. Jobs with the real sidecar and library are in test_main_job.py.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.local_job import FAKES, LocalRun, command, manifest, survivors, wait_until

pytestmark = pytest.mark.timeout(120)

Start = Callable[..., LocalRun]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts runs of one state folder; afterwards nothing of them may live."""
    runs: list[LocalRun] = []

    def begin(*options: str, job: Path | None = None, **changes: Any) -> LocalRun:
        fakes, env = changes.pop("fakes", True), changes.pop("env", None)
        run = LocalRun(job or manifest(tmp_path, **changes), *options, fakes=fakes, env=env)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.close()


def memory_folder(run: LocalRun) -> Path:
    return Path("/dev/shm") / f"backstay-{run.status()['uid'][:8]}"


def identity(run: LocalRun, pod: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.state / "pods" / pod / "pod.json").read_text())
    return found


def train(run: LocalRun, steps: int = 3) -> None:
    """Wait until the job has trained a little."""
    while run.wait_for("progress", phase="Training")["step"] < steps:
        pass


# --- the plain life of a job ----------------------------------------------------------------------


def test_a_job_runs_to_its_end_and_leaves_only_its_state_folder(start: Start) -> None:
    run = start(steps=15, arguments=["--grandchildren"])
    begun = run.wait_for("job_started")
    shm = memory_folder(run)
    assert shm.is_dir()
    assert run.finish() == 0, run.story()
    assert (begun["run"], begun["replicas"], begun["resumed"]) == ("default/fake", 2, False)
    end = run.seen[-1]
    assert (end["event"], end["step"]) == ("job_succeeded", 15)
    assert "nothing is durable" in end["message"]
    assert run.status()["record"]["outcome"] == "Succeeded"
    assert survivors(run.mark) == []
    assert not shm.exists()


def test_each_replica_has_an_address_a_node_and_the_identity_of_a_first_pod(start: Start) -> None:
    run = start()
    pods = [run.wait_for("pod_started") for _ in range(2)]
    first = run.status()["record"]["first_generation"]
    assert [pod["node"] for pod in pods] == ["node-0", "node-1"]
    assert pods[0]["address"] < pods[1]["address"]
    for replica, pod in enumerate(pods):
        assert pod["pod"] == f"fake-{replica}-{first}"
        who = identity(run, pod["pod"])
        assert (who["replica"], who["generation"], who["replaces"]) == (replica, first, 0)
        assert who["current"] == {"0": first, "1": first}
    train(run)
    mode = memory_folder(run).stat().st_mode
    assert mode & 0o077 == 0, "other users see nothing of a job's memory"
    assert (run.state / "token").stat().st_mode & 0o077 == 0


def test_logs_are_shown_line_by_line_when_asked_for(start: Start) -> None:
    run = start("--logs", steps=3)
    run.wait_for("log", container="trainer", replica=1, line="rank 1 done at 3")


def test_nothing_of_another_job_or_launcher_reaches_the_containers(start: Start) -> None:
    script = "env; python -c 'import sys; print(\"python is\", sys.executable)'; sleep 1000"
    foreign = {"BACKSTAY_FAULTS": "x.y=kill", "RANK": "77", "PET_NNODES": "9", "MINE": "kept"}
    run = start(command=["sh", "-c", script], env=foreign)
    run.wait_for("container_started", container="trainer", replica=1)
    log = next(run.state.glob("logs/fake-1-*/trainer.log"))
    wait_until(lambda: "python is" in log.read_text())
    seen = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
    assert "BACKSTAY_FAULTS" not in seen
    assert "PET_NNODES" not in seen
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["MINE"]) == ("1", "2", "kept")
    assert seen["BACKSTAY_VOLUME"].startswith("/dev/shm/backstay-")
    assert "BACKSTAY_TOKEN" not in seen, "the trainer needs no token"
    assert os.path.dirname(os.sys.executable) in log.read_text()  # type: ignore[attr-defined]


# --- being stopped --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_job_in_order_and_nothing_runs_any_more(
    start: Start, number: signal.Signals
) -> None:
    run = start(arguments=["--grandchildren"])
    train(run)
    shm = memory_folder(run)
    run.process.send_signal(number)
    assert run.finish() == 130, run.story()
    assert run.seen[-1]["event"] == "job_stopped"
    assert number.name in run.seen[-1]["why"]
    assert survivors(run.mark) == []
    assert not shm.exists()
    assert run.status()["running"] == {}


def test_a_second_signal_ends_at_once_what_does_not_want_to_end(start: Start) -> None:
    stubborn = "trap '' TERM; echo up; while :; do sleep 1; done"
    run = start("--grace-seconds", "1000", command=["sh", "-c", stubborn])
    log = run.wait_for("container_started", container="trainer", replica=1)
    path = run.state / "logs" / log["pod"] / "trainer.log"
    wait_until(lambda: "up" in path.read_text())
    run.process.send_signal(signal.SIGINT)
    run.wait_for("notice")
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130, run.story()
    assert survivors(run.mark) == []


def test_kill_9_leaves_nothing_running(start: Start) -> None:
    run = start(arguments=["--grandchildren"])
    train(run)
    assert len(survivors(run.mark)) > 10
    run.process.kill()
    run.process.wait()
    wait_until(lambda: survivors(run.mark) == [])


def test_kill_9_right_at_the_start_leaves_nothing_running(start: Start) -> None:
    run = start(arguments=["--grandchildren"])
    run.wait_for("pod_started", replica=1)
    run.process.kill()
    run.process.wait()
    wait_until(lambda: survivors(run.mark) == [])


# --- going on -------------------------------------------------------------------------------------


def test_after_a_stop_the_job_goes_on_with_pods_of_new_generations(start: Start) -> None:
    run = start()
    train(run)
    first = run.status()["record"]["generation"]
    uid = run.status()["uid"]
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130
    again = start()
    assert again.wait_for("job_started")["resumed"] is True
    pods = [again.wait_for("pod_replaced") for _ in range(2)]
    assert [pod["generation"] for pod in pods] == [first + 1, first + 2]
    assert [pod["node"] for pod in pods] == ["node-0", "node-1"], "near their old disks"
    who = identity(again, pods[1]["pod"])
    assert who["replaces"] == first
    assert who["current"] == {"0": first + 1, "1": first + 2}
    assert again.status()["uid"] == uid
    train(again)


def test_after_kill_9_the_same_pods_go_on_in_place(start: Start) -> None:
    run = start()
    train(run)
    marker = next(memory_folder(run).glob("node-0/memory")) / "left.by.the.trainer"
    marker.write_text("x")
    run.process.kill()
    run.process.wait()
    again = start()
    assert again.wait_for("job_started")["resumed"] is True
    pods = [again.wait_for("pod_started") for _ in range(2)]
    first = again.status()["record"]["first_generation"]
    assert [pod["generation"] for pod in pods] == [first, first]
    assert marker.exists(), "the memory tier outlives its runner"
    train(again)
    assert again.of_kind("pod_replaced") == []


def test_a_job_that_was_changed_is_one_that_was_applied_again(start: Start, tmp_path: Path) -> None:
    run = start(steps=5)
    assert run.finish() == 0
    before = run.status()["record"]["generation"]
    more = start(steps=9)
    assert more.finish() == 0, more.story()
    assert more.seen[-1]["step"] == 9
    after = more.status()["record"]
    assert after["first_generation"] == after["generation"] > before


def test_fresh_forgets_what_earlier_runs_left(start: Start) -> None:
    run = start(steps=5)
    assert run.finish() == 0
    uid = run.status()["uid"]
    (run.state / "nodes" / "node-0" / "disk" / "old").write_text("x")
    again = start("--fresh", steps=5)
    assert again.wait_for("job_started")["resumed"] is False
    assert again.finish() == 0
    assert again.status()["uid"] != uid
    assert not list(again.state.glob("nodes/*/disk/old"))


def test_a_job_runs_only_once_at_a_time(start: Start, tmp_path: Path) -> None:
    run = start()
    run.wait_for("job_started")
    other = start()
    assert other.finish() == 2
    assert other.process.stderr is not None
    told = other.process.stderr.read()
    assert f"process {run.process.pid}" in told
    assert "--state-dir" in told


# --- failures -------------------------------------------------------------------------------------


def test_a_killed_trainer_process_is_started_again_in_its_place(start: Start) -> None:
    run = start()
    train(run)
    done = run.fail("trainer", "--replica", "1")
    assert done.returncode == 0, done.stderr
    assert "SIGKILL" in done.stdout
    run.wait_for("failure_injected", failure="trainer", replicas=[1])
    gone = run.wait_for("container_exited", container="trainer", replica=1)
    assert (gone["exit_code"], gone["next"]) == (137, "restarts at once")
    run.wait_for("container_started", container="trainer", replica=1, restarts=1)
    back = run.wait_for("recovered")
    assert back["failures"] == ["trainer"]
    assert back["replicas"] == [1]
    assert 0 <= back["detect_seconds"] <= back["resume_seconds"]
    assert back["bytes_by_tier"] == {"memory": 1000}
    assert back["lost_steps"] == 1
    assert run.of_kind("pod_replaced") == []


def test_a_reboot_wipes_the_memory_and_keeps_disk_node_and_pod(start: Start) -> None:
    run = start()
    train(run)
    volume = next(memory_folder(run).glob("node-1/memory"))
    (volume / "precious").write_text("x")
    (run.state / "nodes" / "node-1" / "disk" / "safe").write_text("x")
    assert run.fail("memory").returncode == 0, "the last replica is the default"
    run.wait_for("failure_injected", failure="memory", replicas=[1])
    for _ in range(2):
        run.wait_for("container_exited", replica=1)
    for container in ("backstay-sidecar", "trainer"):
        run.wait_for("container_started", container=container, replica=1, restarts=1)
    assert run.wait_for("recovered")["failures"] == ["memory"]
    assert not (volume / "precious").exists()
    assert (run.state / "nodes" / "node-1" / "disk" / "safe").exists()
    assert run.of_kind("pod_replaced") == []


def test_a_destroyed_node_takes_memory_and_disk_and_its_pod_comes_back_elsewhere(
    start: Start,
) -> None:
    run = start()
    train(run)
    first = run.status()["record"]["generation"]
    assert run.fail("node", "--replica", "0").returncode == 0
    lost = run.wait_for("pod_lost", replica=0)
    assert "node-0" in lost["why"]
    new = run.wait_for("pod_replaced", replica=0)
    written = run.status()["record"]
    assert written["generation"] >= new["generation"] == first + 1, "persisted before it is told"
    assert new["node"] == "node-2"
    assert identity(run, new["pod"])["current"] == {"0": first + 1, "1": first}
    assert not (run.state / "nodes" / "node-0").exists()
    assert not (memory_folder(run) / "node-0").exists()
    assert run.wait_for("recovered")["failures"] == ["node"]


def test_when_all_nodes_are_destroyed_every_pod_gets_a_number_of_its_own(start: Start) -> None:
    run = start()
    train(run)
    first = run.status()["record"]["generation"]
    assert run.fail("all").returncode == 0
    new = [run.wait_for("pod_replaced") for _ in range(2)]
    assert [pod["generation"] for pod in new] == [first + 1, first + 2]
    assert {pod["node"] for pod in new} == {"node-2", "node-3"}
    back = run.wait_for("recovered")
    assert (back["failures"], back["replicas"]) == (["all"], [0, 1])


def test_orders_that_fit_nothing_name_the_choices(start: Start) -> None:
    run = start()
    train(run)
    wrong = run.fail("node", "--replica", "9")
    assert wrong.returncode == 1
    assert "replica 9 does not run; running: 0, 1" in wrong.stderr
    wrong = run.fail("trainer", "--local-rank", "4")
    assert "local ranks there: 0" in wrong.stderr
    assert run.fail("everything").returncode == 2


def test_a_container_that_keeps_failing_waits_longer_each_time(start: Start) -> None:
    run = start(command=["sh", "-c", "exit 3"])
    waits = [
        run.wait_for("container_exited", container="trainer", replica=0)["next"] for _ in range(4)
    ]
    assert waits == ["restarts at once", "restarts in 1 s", "restarts in 2 s", "restarts in 4 s"]


def test_a_trainer_that_never_gets_to_restore_fails_the_job_with_its_last_words(
    start: Start,
) -> None:
    script = "import time; time.sleep(0.6); raise ImportError('no module named torhc')"
    run = start(command=["python", "-c", script], replicas=2)
    assert run.finish() == 1, run.story()
    end = run.seen[-1]
    assert end["event"] == "job_failed"
    assert "before it calls restore()" in end["why"]
    assert "ImportError: no module named torhc" in end["why"]
    assert any(log.endswith("trainer.log") for log in end["logs"])
    assert survivors(run.mark) == []


def test_a_sidecar_that_never_comes_up_fails_the_job_with_its_last_words(
    start: Start, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "backstay_sidecar.py").write_text("raise RuntimeError('port is taken')")
    run = start(env={"PYTHONPATH": str(broken)})
    assert run.finish() == 1, run.story()
    assert "the sidecar ends before it is up: RuntimeError: port is taken" in run.seen[-1]["why"]
    assert run.of_kind("container_started")[0]["container"] == "backstay-sidecar"
    started = {event["container"] for event in run.of_kind("container_started")}
    assert started == {"backstay-sidecar"}, "a trainer starts only beside a sidecar"


# --- what can't be run ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"checkpoint": {"memory": {"everySteps": 5, "sizeLimit": "900Ti"}}},
            ["sizeLimit", "2 replicas x 900.0 TiB need 1800.0 TiB in /dev/shm", "are free"],
        ),
        ({"replicas": 101}, ["spec.replicas: got 101", "100"]),
        ({"suspend": True}, ["spec.suspend", "write `suspend: false`"]),
        (
            {
                "podTemplate": {
                    "spec": {"containers": [{"name": "trainer", "image": "registry/gpt:1"}]}
                }
            },
            ["command: missing", "image"],
        ),
        (
            {
                "podTemplate": {
                    "spec": {
                        "containers": [
                            {"name": "trainer", "command": ["true"], "workingDir": "nowhere"}
                        ]
                    }
                }
            },
            ["workingDir 'nowhere' is not a folder", "relative to the manifest's folder"],
        ),
        (
            {
                "checkpoint": {
                    "memory": {"everySteps": 5, "sizeLimit": "1Mi"},
                    "remote": {"endpoint": "http://127.0.0.1:9", "bucket": "models"},
                }
            },
            ["no credentials", "BACKSTAY_S3_ACCESS_KEY"],
        ),
    ],
    ids=["memory", "replicas", "suspended", "image only", "working folder", "credentials"],
)
def test_what_this_machine_cannot_run_is_told_before_anything_starts(
    start: Start, changes: dict[str, Any], words: list[str]
) -> None:
    unset = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    run = start(env=unset, **changes)
    assert run.finish() == 2, run.story()
    assert run.process.stderr is not None
    told = run.process.stderr.read()
    for word in words:
        assert word in told, told
    assert "Traceback" not in told
    assert run.of_kind("container_started") == []


def test_jobs_are_listed_and_cleaned(tmp_path: Path) -> None:
    name = f"fake-{os.getpid()}"
    env = {"BACKSTAY_HOME": str(tmp_path / "home"), "PYTHONPATH": str(FAKES)}
    job = manifest(tmp_path, name=name, steps=3)
    ran = command("local", "run", str(job), **env)
    assert ran.returncode == 0, ran.stderr
    assert "succeeded at step" in ran.stdout
    listed = json.loads(command("local", "list", "-o", "json", **env).stdout)
    (own,) = [one for one in listed if one["job"] == name]
    state = tmp_path / "home" / "local" / "default" / name
    assert (own["state"], own["state_dir"]) == ("Succeeded", str(state))
    assert name in command("local", "list", **env).stdout
    assert "not running; Succeeded" in command("status", "--job", name, **env).stdout
    cleaned = command("local", "clean", "--yes", "--job", name, **env)
    assert cleaned.returncode == 0, cleaned.stderr
    assert not state.exists()
    assert command("local", "clean", "--yes", "--job", name, **env).returncode == 3
