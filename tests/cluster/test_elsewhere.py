"""A run that is gone but for the bucket goes on in another namespace, under another name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cluster.conftest import PRIVILEGED
from cluster.kube import Kube, is_true
from cluster.object_store import Store
from cluster.training import RECOVER_SECONDS, SECRET, START_SECONDS, Job, char_gpt

STEPS = 200


@pytest.fixture
def elsewhere(kube: Kube, store: Store) -> Iterator[str]:
    with kube.namespace("test-elsewhere", PRIVILEGED) as name:
        kube.apply(store.secret(SECRET), namespace=name)
        yield name


def test_a_run_is_restored_from_the_bucket_alone_in_another_namespace_under_another_name(
    make_job: Callable[..., Job], store: Store, elsewhere: str
) -> None:
    first = make_job("first", num_steps=STEPS)
    first.apply()
    first.wait("it succeeds", lambda: is_true(first.tree, "Succeeded"), START_SECONDS)
    first.delete()
    first.wait("nothing of it is left", lambda: not first.objects(), RECOVER_SECONDS)
    kept = store.names(f"{first.namespace}/first/")

    heir = replace(make_job("heir", num_steps=2 * STEPS), namespace=elsewhere)
    origin = {"namespace": first.namespace, "runName": "first"}
    heir.manifest["spec"]["restore"] = {"from": origin}
    heir.apply()
    heir.wait("it succeeds", lambda: is_true(heir.tree, "Succeeded"), START_SECONDS)
    status = heir.status
    assert status["lastRestore"]["step"] == STEPS
    assert set(status["lastRestore"]["tiers"]) == {"remote"}
    assert status["durableStep"] == 2 * STEPS
    own = store.names(f"{elsewhere}/heir/checkpoints/{2 * STEPS:012d}-")
    assert any(name.endswith("/commit.json") for name in own)
    assert store.names(f"{first.namespace}/first/") == kept, "the other run is only read"

    # It goes on from its own checkpoints, not from the other run's again.
    heir.delete()
    heir.wait("nothing of it is left", lambda: not heir.objects(), RECOVER_SECONDS)
    pod = heir.manifest["spec"]["podTemplate"]["spec"]
    pod["containers"][0]["command"] = char_gpt(2 * STEPS + 50)
    heir.apply()
    heir.wait("it succeeds", lambda: is_true(heir.tree, "Succeeded"), START_SECONDS)
    assert heir.status["lastRestore"]["step"] == 2 * STEPS


def test_a_run_that_is_not_there_is_refused_in_words(
    make_job: Callable[..., Job],
) -> None:
    job = make_job("nobodys-heir", replicas=2)
    job.manifest["spec"]["restore"] = {"from": {"namespace": "nowhere", "runName": "nothing"}}
    job.apply()
    job.wait("it fails", lambda: is_true(job.tree, "Failed"), START_SECONDS)
    (failed,) = [c for c in job.status["conditions"] if c["type"] == "Failed"]
    assert "nowhere/nothing" in failed["message"]
    assert job.status.get("durableStep", 0) == 0
    job.delete()
    job.wait("nothing of it is left", lambda: not job.objects(), RECOVER_SECONDS)


def test_a_job_that_runs_begins_from_nothing_once_when_it_is_told_to(
    make_job: Callable[..., Job],
) -> None:
    job = make_job("anew", replicas=2)
    job.apply()
    before = job.wait_training(timeout=START_SECONDS)
    members = job.pod_name(1)
    job.set_spec(restore={"fresh": True})
    status = job.wait_training(before["attempt"])
    assert status["lastRestore"]["step"] == 0
    assert job.pod_name(1) == members, "only the leader's pod is made anew"
    job.kill_rank(1)
    status = job.wait_training(status["attempt"])
    assert status["lastRestore"]["step"] > 0, "once"
    job.delete()
    job.wait("nothing of it is left", lambda: not job.objects(), RECOVER_SECONDS)
